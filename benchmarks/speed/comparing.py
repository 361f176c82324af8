# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Which subjects are compared, by the ratios of paired rounds (flexquant.measuring.comparison).

Rounds show only what differs from round to round. Two servers of the same checkpoint also differ for as long
as they run, so where a second server was measured the interval is made wider by the ratio between the two.
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
from flexquant.measuring.comparison import EQUAL, Comparison, compare, percent

Metric = Callable[[dict[str, Any]], float]
Rounds = dict[int, dict[str, Any]]
"""Round -> the result of ``vllm bench serve``."""
Measured = Mapping[Workload, dict[str, Rounds]]
"""Workload -> subject -> rounds."""


def compare_beside(ratios: Sequence[float], again: Sequence[float]) -> Comparison:
    """Return the comparison, wider by the ratios of two servers of the same subject, if there are any."""
    found = compare(ratios)
    return found.widened(compare(again).ratio) if again else found


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
    """The comparison over all rounds of all workloads."""
    again: Comparison | None
    """The same comparison for a second server of the best static subject; None if none was measured."""

    def count(self, verdict: str) -> int:
        return Counter(comparison.verdict for comparison in self.workloads)[verdict]

    def equal(self) -> str:
        """Return how many comparisons say EQUAL and within what, e.g. ``4, within 5.1 % to 14 %``."""
        within = sorted(c.within for c in self.workloads if c.verdict == EQUAL)
        ends = dict.fromkeys(percent(share, math.ceil) for share in (*within[:1], *within[-1:]))
        return ", within ".join([str(len(within)), *([" to ".join(ends)] if ends else [])])


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
            workloads.append(compare_beside(ratios, again))
            every += ratios
            every_again += again
    together = compare_beside(every, every_again)
    return Summary(workloads, together, compare(every_again) if every_again else None)
