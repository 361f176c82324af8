# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Is one thing faster than another? The rule for noise: the interval of a ratio over paired rounds.

In a round all things are measured in turn, so that what drifts hits them alike, and only the ratio within a
round counts. Two things of equal speed could exchange their times within it: the logarithm of the ratio lies
as often above as below its centre, by whatever distance. That symmetry is all that Wilcoxon's signed-rank
test assumes; it takes no distribution for granted, and one stall decides nothing. Its interval lies between
two means of pairs of rounds (Walsh averages), whose median is the estimate by Hodges and Lehmann: M.
Hollander, D. A. Wolfe, E. Chicken, Nonparametric Statistical Methods, 3.1 to 3.3.

Of 10 rounds with normal noise this interval is 1.41 standard deviations wide: Student's is 1.38, the sign
test's 1.97. Of 20 rounds of which every tenth is six times as far off it is 1.15 wide, Student's 1.61, the
sign test's 1.29.

Rounds are added until the interval is narrow, or a budget ends (:class:`Effort`); never until it leaves 1
out, for noise does that sooner or later. To stop when it is narrow also prefers the rounds that happen to
agree: with up to 20 rounds an interval of 95 % then has 93 to 97 %, 91 % where only one of the two stalls.
Stopped when it leaves 1 out it has 84 % (tests/unit/test_comparison.py). What is the same in all rounds, as
the difference between two servers of one checkpoint, no rounds show: see :meth:`Comparison.widened`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

CONFIDENCE = 0.95
FEWEST_ROUNDS = 5
"""Of these the interval is the smallest and the largest ratio, at 94 %; from six on it has CONFIDENCE."""
WIDTH = 0.03
LOWER, HIGHER, EQUAL, UNKNOWN = "lower", "higher", "equal", "too few rounds"


@dataclass(frozen=True)
class Comparison:
    """One thing over another: the estimate of their ratio, and the ends of its interval."""

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

    @property
    def within(self) -> float:
        """How far from 1 the ratio may be: the larger distance of the interval's ends from it."""
        return max(abs(self.low - 1), abs(self.high - 1))

    def is_narrow(self, width: float) -> bool:
        """Whether the interval's ends differ by less than ``width``, a share of the lower one."""
        return self.rounds >= FEWEST_ROUNDS and self.high < self.low * (1 + width)

    def widened(self, ratio: float) -> Comparison:
        """Return the comparison with a wider interval, on both sides, by a ratio that should be 1."""
        apart = max(ratio, 1 / ratio)
        return replace(self, low=self.low / apart, high=self.high * apart)

    def words(self, lower: str = "faster", higher: str = "slower") -> str:
        """Return the verdict, e.g. ``6.9 % faster``, ``equal within 14 %`` or ``too few rounds``.

        The default words are those for ratios of times.
        """
        if self.verdict == EQUAL:
            return f"equal within {percent(self.within, math.ceil)}"
        if self.verdict == UNKNOWN:
            return UNKNOWN
        return f"{percent(abs(self.ratio - 1))} {lower if self.verdict == LOWER else higher}"

    def __str__(self) -> str:
        """Return the ratio and, of several rounds, its interval."""
        ratio, low, high = (f"{value:.3f}" for value in (self.ratio, self.low, self.high))
        return ratio if self.rounds == 1 else f"{ratio} ({low} – {high})"


@dataclass(frozen=True)
class Effort:
    """How many rounds are measured: ``rounds``, then more while an interval is not narrower than ``width``.

    At most ``max_rounds``; with as many as ``rounds`` none are added.
    """

    rounds: int
    max_rounds: int
    width: float = WIDTH

    def changed(
        self, rounds: int | None = None, max_rounds: int | None = None, width: float | None = None
    ) -> Effort:
        """Return it with other values; None: as it is. ``rounds`` alone: that many, and no more."""
        most = max_rounds or rounds or self.max_rounds
        return Effort(min(rounds or self.rounds, most), most, self.width if width is None else width)


def compare(ratios: Sequence[float]) -> Comparison:
    """Return the comparison of one ratio or more, each of one round."""
    logs = np.log(ratios)
    first, second = np.triu_indices(len(logs))
    averages = np.sort((logs[first] + logs[second]) / 2)
    outside = _outside(len(logs))
    ends = averages[outside], averages[-1 - outside]
    ratio, low, high = (math.exp(value) for value in (np.median(averages), *ends))
    return Comparison(ratio, low, high, len(logs))


@functools.cache
def _outside(rounds: int) -> int:
    """Return how many Walsh averages the interval leaves out on either side.

    The largest k with a probability P(W <= k) of at most (1 - CONFIDENCE) / 2 on either side, and 0 where
    there is none. W, the signed-rank statistic, is a sum of ranks 1 to ``rounds``, each in it by a coin.
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
    # What floats add in the end is not rounded up.
    return f"{rounding(round(100 * share, 6) * 10**digits) / 10**digits:.{digits}f} %"
