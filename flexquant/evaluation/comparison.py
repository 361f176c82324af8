# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Decide whether one thing is faster than another, by the interval of their ratio over paired rounds.

In a round all things are measured in turn, so that drift affects them alike, and only the ratio within a
round counts. If two things are equally fast, exchanging their times within a round changes nothing: the
logarithm of the ratio is distributed symmetrically about its centre. Wilcoxon's signed-rank test assumes only
this symmetry and no particular distribution, and a single stall cannot decide it. Its interval lies between
two means of pairs of rounds (Walsh averages), and the median of these means is the Hodges-Lehmann estimate
(M. Hollander, D. A. Wolfe, E. Chicken, Nonparametric Statistical Methods, 3.1 to 3.3).

With 10 rounds of normal noise this interval is hardly wider than Student's, and with stalls it is narrower.

Rounds are added until the interval is narrow or the budget is used up (:class:`Effort`), and never until it
excludes 1, as noise does that sooner or later: with up to 20 rounds a 95 % interval then covers 93 to 97 %,
and would cover 84 % if it stopped once it excludes 1 (tests/unit/test_comparison.py).
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
FEWEST_ROUNDS = 5
"""Least number of rounds: five give the smallest to the largest ratio, at 94 %; six or more CONFIDENCE."""
WIDTH = 0.03
LOWER, HIGHER, EQUAL, UNKNOWN = "lower", "higher", "equal", "too few rounds"


@dataclass(frozen=True)
class Comparison:
    """The estimated ratio of one thing to another, and the ends of its interval."""

    ratio: float
    low: float
    high: float
    rounds: int

    @property
    def verdict(self) -> str:
        """LOWER or HIGHER if the interval excludes 1, EQUAL if not, UNKNOWN below FEWEST_ROUNDS."""
        if self.rounds < FEWEST_ROUNDS:
            return UNKNOWN
        return LOWER if self.high < 1 else HIGHER if self.low > 1 else EQUAL

    def is_narrow(self, width: float) -> bool:
        """Whether the interval's ends differ by less than ``width``, a share of the lower one."""
        return self.rounds >= FEWEST_ROUNDS and self.high < self.low * (1 + width)

    def words(self, lower: str = "faster", higher: str = "slower") -> str:
        """Return the verdict, e.g. ``6.9 % faster``, ``equal within 14 %`` or ``too few rounds``."""
        if self.verdict == EQUAL:
            furthest = max(abs(self.low - 1), abs(self.high - 1))
            return f"equal within {percent(furthest, math.ceil)}"
        if self.verdict == UNKNOWN:
            return UNKNOWN
        return f"{percent(abs(self.ratio - 1))} {lower if self.verdict == LOWER else higher}"

    def __str__(self) -> str:
        """Return the ratio and, for several rounds, its interval."""
        ratio, low, high = (f"{value:.3f}" for value in (self.ratio, self.low, self.high))
        return ratio if self.rounds == 1 else f"{ratio} ({low} – {high})"


@dataclass(frozen=True)
class Effort:
    """Measure ``rounds`` rounds, then more, up to ``max_rounds``, until intervals are below ``width``."""

    rounds: int
    max_rounds: int
    width: float = WIDTH

    def changed(
        self, rounds: int | None = None, max_rounds: int | None = None, width: float | None = None
    ) -> "Effort":
        """Return a copy; None keeps a field. ``rounds`` alone also limits ``max_rounds``."""
        most = max_rounds or rounds or self.max_rounds
        return Effort(min(rounds or self.rounds, most), most, self.width if width is None else width)


def compare(ratios: Sequence[float]) -> Comparison:
    """Return the comparison from the ratios of one or more rounds."""
    logs = np.log(ratios)
    first, second = np.triu_indices(len(logs))
    averages = np.sort((logs[first] + logs[second]) / 2)
    outside = _outside(len(logs))
    ends = averages[outside], averages[-1 - outside]
    ratio, low, high = (math.exp(value) for value in (np.median(averages), *ends))
    return Comparison(ratio, low, high, len(logs))


@functools.cache
def _outside(rounds: int) -> int:
    """Return how many Walsh averages the interval leaves out on either side: the largest k, or 0, with

    P(W <= k) of at most (1 - CONFIDENCE) / 2, where W sums ranks that are each taken with probability 1/2.
    """
    probability = np.zeros(rounds * (rounds + 1) // 2 + 1)
    probability[0] = 1
    for rank in range(1, rounds + 1):
        probability[rank:] = (probability[rank:] + probability[:-rank]) / 2
        probability[:rank] /= 2
    return max(0, int(np.sum(np.cumsum(probability) <= (1 - CONFIDENCE) / 2)) - 1)


def percent(share: float, rounding: Callable[[float], int] = round) -> str:
    """Return e.g. ``14 %``, ``2.3 %`` or ``0.05 %``."""
    digits = 0 if share >= 0.1 else 1 if share >= 0.01 else 2
    # Round away floating-point error first, lest ``math.ceil`` rounds it up.
    return f"{rounding(round(100 * share, 6) * 10**digits) / 10**digits:.{digits}f} %"
