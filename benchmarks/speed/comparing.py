# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Which subjects are compared, by the ratios of paired rounds (flexquant.evaluation.comparison).

Rounds show only what differs from round to round. Two servers of the same checkpoint also differ for as long
as they run, so where a second server was measured the interval is made wider by the ratio between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.speed.subjects import AGAIN, FLEXQUANT, STATIC, is_peer
from benchmarks.speed.workloads import Workload
from flexquant.evaluation.comparison import Comparison, compare

Metric = Callable[[dict[str, Any]], float]
Rounds = dict[int, dict[str, Any]]
"""Round -> the result of ``vllm bench serve``."""
Measured = Mapping[Workload, dict[str, Rounds]]
"""Workload -> subject -> rounds."""


def compare_beside(ratios: Sequence[float], again: Sequence[float]) -> Comparison:
    """Return the comparison, wider on both sides by the ratio of two servers of one subject, if any.

    Rounds do not show an error that is the same in all of them.
    """
    found, ratio = compare(ratios), compare(again).ratio if again else 1.0
    apart = max(ratio, 1 / ratio)
    return replace(found, low=found.low / apart, high=found.high * apart)


def paired_ratios(rounds: Rounds, reference: Rounds, metric: Metric) -> list[float]:
    """Return subject over reference for every round that both have; an answer of one token has no TPOT."""
    both = ((metric(rounds[n]), metric(reference[n])) for n in sorted(rounds.keys() & reference.keys()))
    return [subject / other for subject, other in both if other]


def second_server(subjects: dict[str, Rounds], static: str, metric: Metric) -> list[float]:
    """Return, for every round, the second server of a static subject over the first."""
    return paired_ratios(subjects.get(static + AGAIN, {}), subjects[static], metric)


def pairs(subjects: Iterable[str]) -> list[tuple[str, str]]:
    """Return the pairs (FlexQuant's subject, static subject or peer) that are worth a ratio.

    A constant policy is not compared: `benchmarks.own_cost` tells what it costs, within one engine.
    """
    names = list(subjects)
    routed = [s for s in names if s.startswith(FLEXQUANT) and s.removeprefix(FLEXQUANT) not in STATIC]
    references = [*(static for static in STATIC if static in names), *filter(is_peer, names)]
    return [(subject, reference) for subject in routed for reference in references]
