# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Choose from samples the variant for every size, in ranges, with the thresholds between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from flexquant.errors import FlexQuantError
from flexquant.tuning.samples import MEASURED_PHASES, Samples

MARGIN = 0.02
"""Largest slowdown (0.02 = 2 %), by the low end of its interval, at which a variant ties with the fastest.

It is also the least gain for which a further range of sizes is made.
"""
CLOSE = 0.05
"""Largest slowdown (0.05 = 5 %), by its estimate, at which a variant still ties with the fastest.

This keeps a wide, noisy interval from hiding a larger difference.
"""
DOUBTFUL = 0.15
"""A size is undecided if a variant there can be as fast as the fastest, or slower by more than this share."""
MOST_DOUBTFUL = 1 / 3
"""Largest share of undecided sizes; with more, the machine counts as too noisy."""
UNMET = 10.0
"""Cost of missing a bound; it exceeds the cost of any precision."""


@dataclass(frozen=True)
class Range:
    """The sizes up to ``last`` (None: no upper end), for which ``variant`` is chosen."""

    last: int | None
    variant: str
    between: tuple[int, int] | None
    """The measured sizes on either side of its upper end."""


@dataclass(frozen=True)
class Decision:
    """The chosen variants."""

    ranges: dict[str, tuple[Range, ...]]
    """Phase (``decode``, ``prefill``) -> ranges of sizes, without gaps from 1."""

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(r.variant for phase in MEASURED_PHASES for r in self.ranges[phase]))

    def variant(self, phase: str, size: int) -> str:
        return next(r.variant for r in self.ranges[phase] if r.last is None or size <= r.last)


def choose_by_size(
    samples: Samples, variants: Sequence[str], slo: Mapping[str, float] | None = None
) -> Decision:
    """Choose a variant for every measured size, at the least total cost, and the ends of the ranges.

    ``variants`` begin with the most precise, which is preferred at equal cost. ``slo`` maps phases to upper
    bounds on their passes, in seconds.
    """
    ranges: dict[str, tuple[Range, ...]] = {}
    for phase in MEASURED_PHASES:
        sizes, bound = samples.sizes(phase), (slo or {}).get(phase)
        path = _cheapest_path(variants, [_costs(samples, variants, phase, size, bound) for size in sizes])
        found: list[Range] = []
        for (a, variant), (b, following) in pairwise(zip(sizes, path, strict=True)):
            if variant != following:
                ends = (_behind(samples, variant, following, phase, size, bound) for size in (a, b))
                found.append(Range(_zero(a, b, *ends), variant, (a, b)))
        ranges[phase] = (*found, Range(None, path[-1], None))
    return Decision(ranges)


def _costs(
    samples: Samples, variants: Sequence[str], phase: str, size: int, bound: float | None
) -> dict[str, float]:
    """Return variant -> cost of choosing it for passes of one size, as the logarithm of a ratio of times.

    Among the variants that tie with the fastest, by MARGIN and CLOSE, the most precise costs nothing and the
    others cost MARGIN. With a bound, the more precise of those that keep it costs less.
    """
    found = samples.to_fastest(variants, phase, size)
    as_fast = [v for v, c in found.items() if c.low <= 1 + MARGIN and c.ratio <= 1 + CLOSE]
    costs = {v: MARGIN if v in as_fast else max(MARGIN, math.log(c.ratio)) for v, c in found.items()}
    costs[as_fast[0]] = 0.0
    if bound is None:
        return costs
    # Each step down in precision costs more than a change of variant between sizes.
    return {
        v: 2 * MARGIN * step if samples.time(v, phase, size).median <= bound else UNMET + costs[v]
        for step, v in enumerate(variants)
    }


def _behind(samples: Samples, a: str, b: str, phase: str, size: int, bound: float | None) -> float:
    """Return the logarithm of the time of ``a`` over that of ``b``, or over the bound if there is one."""
    if bound is None:
        return math.log(samples.compare(a, b, phase, size).ratio)
    return math.log(samples.time(a, phase, size).median / bound)


def wide(samples: Samples, variants: Sequence[str], width: float) -> list[tuple[str, int]]:
    """Return the passes in which some variant's ratio to the fastest has an interval of ``width`` or more."""
    return [
        one
        for one in samples.passes
        if not all(c.is_narrow(width) for c in samples.to_fastest(variants, *one).values())
    ]


def undecided(samples: Samples, variants: Sequence[str], phase: str) -> dict[int, float]:
    """Return undecided size -> share by which a variant that can tie with the fastest can also be slower.

    A size is undecided if the share is more than DOUBTFUL.
    """
    shares = {
        size: max(
            c.high - 1 for c in samples.to_fastest(variants, phase, size).values() if c.low <= 1 + MARGIN
        )
        for size in samples.sizes(phase)
    }
    return {size: share for size, share in shares.items() if share > DOUBTFUL}


def check_decidable(samples: Samples, variants: Sequence[str]) -> None:
    """Raise FlexQuantError if more than MOST_DOUBTFUL of the sizes are undecided, and drop their samples."""
    doubtful = {phase: undecided(samples, variants, phase) for phase in MEASURED_PHASES}
    count = sum(map(len, doubtful.values()))
    total = len(samples.passes)
    if count <= MOST_DOUBTFUL * total:
        return
    for phase, sizes in doubtful.items():
        for size in sizes:
            samples.forget(phase, size)
    raise FlexQuantError(
        f"this machine is too noisy to decide: at {count} of {total} sizes the times of the variants "
        f"overlap and scatter by more than {DOUBTFUL:.0%}; stop what else runs on it and start again, "
        "which measures these sizes anew, or raise --max-rounds"
    )


def _cheapest_path(variants: Sequence[str], costs: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the variants of all sizes with the least total cost; a change costs MARGIN (Viterbi)."""
    totals = dict.fromkeys(variants, 0.0)
    steps: list[dict[str, str]] = []
    for cost in costs:
        before = {
            v: min(variants, key=lambda u: (totals[u] + MARGIN * (u != v), u != v, variants.index(u)))
            for v in variants
        }
        totals = {
            v: totals[before[v]] + MARGIN * (before[v] != v and bool(steps)) + cost[v] for v in variants
        }
        steps.append(before)
    path = [min(variants, key=lambda v: (totals[v], variants.index(v)))]
    for before in steps[:0:-1]:
        path.append(before[path[-1]])
    return path[::-1]


def _zero(a: int, b: int, at_a: float, at_b: float) -> int:
    """Return the last size before the line from ``at_a`` to ``at_b``, over log size, crosses zero."""
    share = -at_a / (at_b - at_a) if at_a < 0 < at_b else 0.5
    return min(max(math.floor(a * (b / a) ** share), a), b - 1)
