# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Is one subject faster than another? Ratios of paired rounds, with the interval that noise leaves open.

The rule is that of ``flexquant tune``: the median of the logarithms of the ratios, and its 95 % interval by
the sign test (flexquant/tuning/samples.py). Rounds show only what differs from round to round. Two servers of
the same checkpoint also differ for as long as they run, so where a second server was measured the interval is
made wider, on both sides, by the median ratio between the two.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.speed.subjects import AGAIN, FLEXQUANT, STATIC
from benchmarks.speed.workloads import Workload
from flexquant.tuning.samples import median_interval

Metric = Callable[[dict[str, Any]], float]
Rounds = dict[int, dict[str, Any]]
"""Round -> the result of ``vllm bench serve``."""
Measured = Mapping[Workload, dict[str, Rounds]]
"""Workload -> subject -> rounds."""

FEWEST_ROUNDS = 5
"""Of these the interval is the smallest and the largest, at 94 % confidence; from six on it has 95 %."""
LOWER, HIGHER, EQUAL, UNKNOWN = "lower", "higher", "not told apart", "too few rounds"


@dataclass(frozen=True)
class Comparison:
    """A subject over another: the median of the ratios of paired rounds, and its interval."""

    ratio: float
    low: float
    high: float
    rounds: int

    @property
    def verdict(self) -> str:
        """LOWER or HIGHER if the interval leaves 1 out, EQUAL if not, UNKNOWN below FEWEST_ROUNDS."""
        if self.rounds < FEWEST_ROUNDS:
            return UNKNOWN
        return LOWER if self.high < 1 else HIGHER if self.low > 1 else EQUAL

    def format(self, digits: int = 3) -> str:
        """Return the median ratio and, of several rounds, its interval."""
        median, low, high = (f"{value:.{digits}f}" for value in (self.ratio, self.low, self.high))
        return median if self.rounds == 1 else f"{median} ({low} – {high})"


def compare(ratios: Sequence[float], again: Sequence[float] = ()) -> Comparison:
    """Return the comparison of one or more ratios.

    ``again``: the ratios of two servers of the same subject, by whose median the interval is made wider.
    """
    median, low, high = median_interval([math.log(ratio) for ratio in ratios])
    wider = abs(statistics.median(map(math.log, again))) if again else 0.0
    return Comparison(math.exp(median), math.exp(low - wider), math.exp(high + wider), len(ratios))


def paired_ratios(rounds: Rounds, reference: Rounds, metric: Metric) -> list[float]:
    """Return subject over reference for every round that both have."""
    return [metric(rounds[n]) / metric(reference[n]) for n in sorted(rounds.keys() & reference.keys())]


def second_server(subjects: dict[str, Rounds], static: str, metric: Metric) -> list[float]:
    """Return, for every round, the second server of a static subject over the first."""
    return paired_ratios(subjects.get(static + AGAIN, {}), subjects[static], metric)


def pairs(subjects: Sequence[str], constant: bool) -> list[tuple[str, str]]:
    """Return the pairs (FlexQuant's subject, static subject) that are worth a ratio.

    ``constant``: each constant policy with its own static checkpoint; else all other pairs.
    """
    return [
        (subject, static)
        for subject in subjects
        if subject.startswith(FLEXQUANT)
        for static in STATIC
        if static in subjects
        and (
            subject.removeprefix(FLEXQUANT) == static
            if constant
            else subject.removeprefix(FLEXQUANT) not in STATIC
        )
    ]


def routed(subjects: Iterable[str]) -> list[str]:
    """Return FlexQuant's subjects that are no constant policy and have a static subject beside them."""
    return list(dict.fromkeys(subject for subject, _ in pairs(list(subjects), constant=False)))


def best_static(subjects: dict[str, Rounds], metric: Metric) -> str:
    """Return the static subject with the smallest median."""
    statics = [s for s in STATIC if s in subjects]
    return min(statics, key=lambda s: statistics.median(map(metric, subjects[s].values())))


@dataclass(frozen=True)
class Summary:
    """A FlexQuant subject against the best static one of each workload, by one metric."""

    workloads: list[Comparison]
    together: Comparison
    """All rounds of all workloads."""
    again: Comparison | None
    """The same of a second server of the best static subject; None if none was measured."""

    def count(self, verdict: str) -> int:
        return Counter(comparison.verdict for comparison in self.workloads)[verdict]


def summarise(measured: Measured, subject: str, metric: Metric) -> Summary:
    """Return the summary over the workloads that ``subject`` and a static subject were measured at."""
    workloads, every, every_again = [], [], []
    for subjects in measured.values():
        if subject not in routed(subjects):
            continue
        best = best_static(subjects, metric)
        ratios = paired_ratios(subjects[subject], subjects[best], metric)
        again = second_server(subjects, best, metric)
        if ratios:
            workloads.append(compare(ratios, again))
            every += ratios
            every_again += again
    return Summary(workloads, compare(every, every_again), compare(every_again) if every_again else None)
