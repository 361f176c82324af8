# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""From samples to the variant of every size, in ranges, with the crossovers between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from flexquant.errors import FlexQuantError
from flexquant.tuning.samples import PHASES, Samples

MARGIN = 0.02
"""A variant counts as fast as the fastest if its time is not surely longer by this share.

Surely: with the whole interval of their ratio. A further range of sizes is made only if it gains this share
too.
"""
CLOSE = 0.05
"""A variant counts as fast as the fastest only if the estimate of its time is longer by at most this share.

So noise that makes the interval wide cannot hide a larger difference.
"""
DOUBTFUL = 0.15
"""A size is undecided if a variant may be as fast as the fastest there, and may be slower by this share."""
MOST_DOUBTFUL = 1 / 3
"""The machine is too noisy if more than this share of the sizes is undecided."""


class TooNoisyError(FlexQuantError):
    """The times say too little; ``sizes``, by phase, are those that they do not decide."""

    def __init__(self, message: str, sizes: dict[str, list[int]]) -> None:
        super().__init__(message)
        self.sizes = sizes


Cost = Callable[[str, str, int], float]
"""phase, variant, size -> what choosing the variant costs there, as the logarithm of a ratio of times."""


@dataclass(frozen=True)
class Range:
    """The sizes from ``first`` to ``last`` (None: all larger ones), for which ``variant`` is chosen."""

    first: int
    last: int | None
    variant: str
    between: tuple[int, int] | None
    """The measured sizes on either side of its upper end."""


@dataclass(frozen=True)
class Decision:
    """For each phase, ``decode`` and ``prefill``, ranges of sizes without gaps from 1."""

    ranges: dict[str, tuple[Range, ...]]

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(r.variant for phase in PHASES for r in self.ranges[phase]))

    def variant(self, phase: str, size: int) -> str:
        return next(r.variant for r in self.ranges[phase] if r.last is None or size <= r.last)


def fastest(samples: Samples, variants: Sequence[str]) -> Cost:
    """Return the cost of not being the fastest of ``variants``, which begin with the most precise.

    Of those that are as fast, by MARGIN and CLOSE, the most precise costs nothing, the others
    MARGIN.
    """

    def cost(phase: str, variant: str, size: int) -> float:
        found = samples.to_fastest(variants, phase, size)
        as_fast = [v for v, c in found.items() if c.low <= 1 + MARGIN and c.ratio <= 1 + CLOSE]
        if variant == as_fast[0]:
            return 0.0
        return MARGIN if variant in as_fast else max(MARGIN, math.log(found[variant].ratio))

    return cost


def decide(
    samples: Samples, variants: Sequence[str], cost: Cost, crossing: Callable[[str, str, str, int], float]
) -> Decision:
    """Choose a variant for every measured size, at the least cost in all, and where ranges of them end.

    ``variants`` begin with the most precise, which is preferred at equal cost. ``crossing(phase, a, b,
    size)`` is negative where ``a`` is to be kept and positive where ``b`` is to take over.
    """
    return Decision(
        {phase: _ranges(phase, samples.sizes(phase), variants, cost, crossing) for phase in PHASES}
    )


def relative_speed(samples: Samples) -> Callable[[str, str, str, int], float]:
    """Return the crossing of plain speed: the logarithm of the time of ``a`` over that of ``b``."""
    return lambda phase, a, b, size: math.log(samples.compare(a, b, phase, size).ratio)


def wide(samples: Samples, variants: Sequence[str], phase: str, width: float) -> list[int]:
    """Return the sizes at which the interval of some variant over the fastest is not narrower than that."""
    return [
        size
        for size in samples.sizes(phase)
        if not all(c.is_narrow(width) for c in samples.to_fastest(variants, phase, size).values())
    ]


def undecided(samples: Samples, variants: Sequence[str], phase: str) -> dict[int, float]:
    """Return, of the sizes where a variant may be as fast as the fastest, by what share it may be slower.

    Only those at which it may be by more than DOUBTFUL.
    """
    shares = {
        size: max(
            c.high - 1 for c in samples.to_fastest(variants, phase, size).values() if c.low <= 1 + MARGIN
        )
        for size in samples.sizes(phase)
    }
    return {size: share for size, share in shares.items() if share > DOUBTFUL}


def check_decidable(samples: Samples, variants: Sequence[str]) -> dict[str, list[int]]:
    """Return the undecided sizes by phase; raise TooNoisyError if they are more than MOST_DOUBTFUL."""
    doubtful = {phase: list(undecided(samples, variants, phase)) for phase in PHASES}
    count, total = (sum(map(len, d.values())) for d in (doubtful, {p: samples.sizes(p) for p in PHASES}))
    if count > MOST_DOUBTFUL * total:
        raise TooNoisyError(
            f"this machine is too noisy to decide: at {count} of {total} sizes the times of the variants "
            f"overlap and scatter by more than {DOUBTFUL:.0%}; stop what else runs on it and start again, "
            "which measures these sizes anew, or raise --max-rounds",
            doubtful,
        )
    return doubtful


def _ranges(
    phase: str,
    sizes: Sequence[int],
    variants: Sequence[str],
    cost: Cost,
    crossing: Callable[[str, str, str, int], float],
) -> tuple[Range, ...]:
    path = _cheapest_path(phase, sizes, variants, cost)
    ends = []
    for (a, variant), (b, following) in pairwise(zip(sizes, path, strict=True)):
        if variant != following:
            signs = [crossing(phase, variant, following, size) for size in (a, b)]
            ends.append((_zero(a, b, *signs), variant, (a, b)))
    ranges = []
    first = 1
    for end, variant, bracket in ends:
        ranges.append(Range(first, end, variant, bracket))
        first = end + 1
    return (*ranges, Range(first, None, path[-1], None))


def _cheapest_path(phase: str, sizes: Sequence[int], variants: Sequence[str], cost: Cost) -> list[str]:
    """Return the variant of every size that costs least in all, a change costing MARGIN (Viterbi)."""
    totals = dict.fromkeys(variants, 0.0)
    steps: list[dict[str, str]] = []
    for size in sizes:
        before = {
            v: min(variants, key=lambda u: (totals[u] + MARGIN * (u != v), u != v, variants.index(u)))
            for v in variants
        }
        totals = {
            v: totals[before[v]] + MARGIN * (before[v] != v and bool(steps)) + cost(phase, v, size)
            for v in variants
        }
        steps.append(before)
    path = [min(variants, key=lambda v: (totals[v], variants.index(v)))]
    for before in steps[:0:-1]:
        path.append(before[path[-1]])
    return path[::-1]


def _zero(a: int, b: int, at_a: float, at_b: float) -> int:
    """Return the last size of the range that ends between ``a`` and ``b``: where a line crosses zero."""
    share = -at_a / (at_b - at_a) if at_a < 0 < at_b else 0.5
    return min(max(math.floor(a * (b / a) ** share), a), b - 1)
