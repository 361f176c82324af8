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
    """How often two subjects get the same tasks right."""

    number: int
    only_first: int
    """Tasks that only the first gets right."""
    only_second: int
    difference: float
    """The share that the first gets right minus the share that the second gets right."""
    low: float
    high: float
    """The ends of the difference's interval."""
    p: float
    """The p-value of McNemar's exact test: the chance of so uneven a split if both are equally good."""


def compare_paired(first: Sequence[bool], second: Sequence[bool]) -> PairedShares:
    """Compare two lists of outcomes on the same tasks, in the same order; there is at least one task.

    The interval is R. G. Newcombe's tenth method (Statistics in Medicine 17, 2635-2650, 1998): it combines
    Wilson's two intervals with the correlation of the pairs.
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
    """A median of numbers, where None stands for a number larger than all others: no end was seen."""

    median: float | None
    interval: tuple[float | None, float | None] | None
    """The ends of the interval; None if there are too few values for one."""


def median_of(values: Sequence[int | None]) -> Median:
    """Return the median and its sign-test interval, whose ends are two of the values. None is the largest."""
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
