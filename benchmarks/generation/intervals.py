# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Intervals of 95 % for shares, for differences of shares on the same tasks, and for medians."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
Z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


def wilson(right: int, number: int) -> tuple[float, float]:
    """Return Wilson's score interval for a share, e.g. (0.31, 0.69) for 5 of 10; ``number`` is at least 1."""
    share, z2 = right / number, Z * Z
    centre = (share + z2 / (2 * number)) / (1 + z2 / number)
    half = Z / (1 + z2 / number) * math.sqrt(share * (1 - share) / number + z2 / (4 * number * number))
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True)
class PairedShares:
    """How often two answer the same tasks rightly."""

    number: int
    only_first: int
    """Tasks that the first alone gets right."""
    only_second: int
    difference: float
    """Share that the first gets right minus that of the second."""
    low: float
    high: float
    """The ends of the difference's interval."""
    p: float
    """Of McNemar's exact test: how likely so uneven a split is, were both equally good."""


def compare_paired(first: Sequence[bool], second: Sequence[bool]) -> PairedShares:
    """Compare two on the same tasks, at least one, in the same order.

    The interval is R. G. Newcombe's tenth (Statistics in Medicine 17, 2635-2650, 1998): Wilson's two
    intervals, put together with the correlation of the pairs.
    """
    number = len(first)
    both = sum(a and b for a, b in zip(first, second, strict=True))
    only_first, only_second = sum(first) - both, sum(second) - both
    neither = number - both - only_first - only_second
    p1, p2 = sum(first) / number, sum(second) / number
    (low1, high1), (low2, high2) = wilson(sum(first), number), wilson(sum(second), number)
    product = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    excess = float(both * neither - only_first * only_second)
    if excess > 0:
        excess = max(excess - number / 2, 0.0)
    correlation = excess / math.sqrt(product) if product else 0.0

    def distance(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * correlation * a * b + b * b))

    return PairedShares(
        number,
        only_first,
        only_second,
        p1 - p2,
        p1 - p2 - distance(p1 - low1, high2 - p2),
        p1 - p2 + distance(high1 - p1, p2 - low2),
        mcnemar(only_first, only_second),
    )


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the two-sided p-value of McNemar's exact test: is the split that of a fair coin?"""
    number = only_first + only_second
    tail = sum(math.comb(number, k) for k in range(min(only_first, only_second) + 1)) / 2**number
    return min(1.0, 2 * tail)


@dataclass(frozen=True)
class Median:
    """None stands for beyond all numbers: no end was seen."""

    median: float | None
    interval: tuple[float | None, float | None] | None
    """None: too few values for one."""


def median_of(values: Sequence[int | None]) -> Median:
    """Return the median, and its interval by the sign test: two of the values. None is above all others."""
    ordered = sorted(math.inf if value is None else value for value in values)
    number = len(ordered)
    rank, tail = 0, 1 / 2**number
    while tail <= (1 - CONFIDENCE) / 2:
        rank += 1
        tail += math.comb(number, rank) / 2**number
    interval = (_seen(ordered[rank - 1]), _seen(ordered[number - rank])) if rank else None
    return Median(_seen(statistics.median(ordered)), interval)


def _seen(value: float) -> float | None:
    return None if value == math.inf else value
