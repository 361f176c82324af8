# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Decide from samples which variant runs passes of which size, for a goal such as latency or bounds."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from statistics import fmean

from flexquant.errors import FlexQuantError, UsageError
from flexquant.tuning.samples import MARGIN, MEASURED_PHASES, Samples

OBJECTIVES = ("balanced", "latency", "throughput")
WORTH_LOADING = 0.05
"""Objective balanced: a variant is loaded if some size would be slower by this share without it."""
CLOSE = 0.05
"""Largest slowdown (0.05 = 5 %), by its estimate, at which a variant ties, whatever its noisy interval."""
UNMET = 10.0
"""Cost of missing a bound; it exceeds the cost of any precision."""
DURATION = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*(ms|s)")
BOUNDS = {"prefill": "ttft", "decode": "tpot"}
"""Phase -> name of the bound on its passes."""


@dataclass(frozen=True)
class Range:
    """The sizes up to ``last`` (None: no upper end), for which ``variant`` is chosen."""

    last: int | None
    variant: str
    between: tuple[int, int] | None
    """The measured sizes on either side of its upper end."""


@dataclass(frozen=True)
class Decision:
    ranges: dict[str, tuple[Range, ...]]
    """Phase (``decode``, ``prefill``) -> ranges of sizes, without gaps from 1."""

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(r.variant for phase in MEASURED_PHASES for r in self.ranges[phase]))

    def variant(self, phase: str, size: int) -> str:
        return next(r.variant for r in self.ranges[phase] if r.last is None or size <= r.last)


@dataclass(frozen=True)
class Goal:
    """What the policy is optimised for: an objective of OBJECTIVES, or bounds in its place."""

    objective: str = "balanced"
    slo: Mapping[str, float] = field(default_factory=dict)
    """Phase -> upper bound on a pass, in seconds."""
    request_tokens: int = 2048
    """Tokens of a request, prompt and answer together; for throughput, which depends on how many fit."""

    def __str__(self) -> str:
        bounds = (f"{BOUNDS[phase]}={1e3 * value:g}ms" for phase, value in self.slo.items())
        return ",".join(bounds) or self.objective


def parse_slo(text: str) -> dict[str, float]:
    """Return phase -> seconds of e.g. ``ttft=300ms,tpot=30ms``; raise UsageError for anything else."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        match = DURATION.fullmatch(value.strip())
        if name not in BOUNDS.values() or name in found or match is None or float(match[1]) == 0:
            problem = f"'{part.strip()}' in --slo is not a bound"
            raise UsageError(f"{problem}; write ttft=300ms, tpot=30ms or both, with a comma between them")
        found[name] = float(match[1]) / (1000 if match[2] == "ms" else 1)
    return {phase: found[name] for phase, name in BOUNDS.items() if name in found}


Requests = Callable[[Sequence[str]], int]
"""Variants -> requests that fit into memory beside their weights."""


def decide(
    samples: Samples,
    variants: Sequence[str],
    goal: Goal,
    requests: Requests,
    together: Sequence[Sequence[str]] | None = None,
) -> Decision:
    """Return the best decision for the goal; raise FlexQuantError if none meets it.

    ``variants`` begin with the most precise. ``together`` are sets of them that can be loaded together; None:
    all can. The first set that meets the goal is taken, unless the passes that another chooses are faster, in
    the geometric mean over all sizes, by more than MARGIN.
    """
    found: list[tuple[float, Decision]] = []
    refusals: list[FlexQuantError] = []
    for names in [variants] if together is None else together:
        try:
            decision = _best_of(samples, names, goal, requests)
        except FlexQuantError as e:
            refusals.append(e)
            continue
        times = (samples.time(decision.variant(*one), *one).median for one in samples.passes)
        found.append((fmean(map(math.log, times)), decision))
    if not found:
        raise refusals[0]
    least = min(time for time, _ in found)
    return next(decision for time, decision in found if time <= least + MARGIN)


def _best_of(samples: Samples, variants: Sequence[str], goal: Goal, requests: Requests) -> Decision:
    """Return the decision for a set of variants that are loaded together.

    ``latency`` takes the fastest variant at every size, ``balanced`` the same of variants WORTH_LOADING,
    ``throughput`` those that decode most tokens a second at the largest batch that fits beside them.
    """
    if goal.slo:
        return _meet(samples, variants, goal.slo)
    if goal.objective == "throughput":
        variants = _most_throughput(samples, variants, requests)
    elif goal.objective == "balanced":
        variants = _worth_loading(samples, variants)
    return choose_by_size(samples, variants)


def _meet(samples: Samples, variants: Sequence[str], slo: Mapping[str, float]) -> Decision:
    """Choose by size the most precise variant within the bound, or the fastest; raise if none keeps it."""
    unmet = []
    for phase, bound in slo.items():
        size = samples.sizes(phase)[0]
        best = min(variants, key=lambda v: samples.time(v, phase, size).median)
        nearest = samples.time(best, phase, size).median
        if nearest > bound:
            name, unit = BOUNDS[phase], "sequence(s)" if phase == "decode" else "tokens"
            takes = f"takes {1e3 * nearest:.3g} ms with the fastest variant, {best}"
            why = f"{name}={1e3 * bound:g}ms cannot be met: a {phase} pass of {size} {unit} {takes}"
            unmet.append(f"{why}; ask for {name}={math.ceil(1e3 * nearest * (1 + MARGIN))}ms or more")
    if unmet:
        raise FlexQuantError(". ".join(unmet))
    return choose_by_size(samples, variants, slo)


def _worth_loading(samples: Samples, variants: Sequence[str]) -> list[str]:
    """Drop variants one at a time, the least missed first, while dropping costs less than WORTH_LOADING."""
    kept = list(choose_by_size(samples, variants).variants)
    kept.sort(key=variants.index)
    while len(kept) > 1:
        # The logarithm of the slowdown without a variant, at the size that needs it most.
        losses = {}
        for v in kept:
            ratios = [[samples.compare(o, v, *one).ratio for o in kept if o != v] for one in samples.passes]
            losses[v] = math.log(max(map(min, ratios)))
        least = min(kept, key=lambda v: losses[v])
        if losses[least] >= math.log1p(WORTH_LOADING):
            break
        kept.remove(least)
    return kept


def _most_throughput(samples: Samples, variants: Sequence[str], requests: Requests) -> list[str]:
    subsets = [s for n in range(1, len(variants) + 1) for s in combinations(variants, n)]
    speeds = {s: _decode_throughput(samples, s, requests(s)) for s in subsets}
    best = max(speeds.values())
    if best == 0:
        problem = "no variant leaves room in memory for one request"
        raise FlexQuantError(f"{problem}; lower --request-tokens, or use more devices")
    return list(next(s for s, speed in speeds.items() if speed >= best / (1 + MARGIN)))


def _decode_throughput(samples: Samples, variants: Sequence[str], requests: int) -> float:
    """Return decoded tokens a second at the largest measured batch up to ``requests``; 0 if none fits."""
    fitting = [n for n in samples.sizes("decode") if n <= requests]
    if not fitting:
        return 0.0
    return fitting[-1] / min(samples.time(v, "decode", fitting[-1]).median for v in variants)


def choose_by_size(
    samples: Samples, variants: Sequence[str], slo: Mapping[str, float] | None = None
) -> Decision:
    """Choose a variant for every measured size, at the least total cost, and the ends of the ranges.

    The first of ``variants``, the most precise, is preferred at equal cost. ``slo``: phase -> bound, s.
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

    Of those that tie with the fastest, the most precise costs 0. With a bound, those more precise cost less.
    """
    found = samples.to_fastest(variants, phase, size)
    as_fast = [v for v, c in found.items() if c.low <= 1 + MARGIN and c.ratio <= 1 + CLOSE]
    costs = {v: MARGIN if v in as_fast else max(MARGIN, math.log(c.ratio)) for v, c in found.items()}
    costs[as_fast[0]] = 0.0
    if bound is None:
        return costs
    for step, v in enumerate(variants):
        is_kept = samples.time(v, phase, size).median <= bound
        # Each step down in precision costs more than a change of variant between sizes.
        costs[v] = 2 * MARGIN * step if is_kept else UNMET + costs[v]
    return costs


def _behind(samples: Samples, a: str, b: str, phase: str, size: int, bound: float | None) -> float:
    """Return the logarithm of the time of ``a`` over that of ``b``, or over the bound if there is one."""
    if bound is None:
        return math.log(samples.compare(a, b, phase, size).ratio)
    return math.log(samples.time(a, phase, size).median / bound)


def _cheapest_path(variants: Sequence[str], costs: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the variants of all sizes with the least total cost; a change costs MARGIN (Viterbi)."""
    totals = dict.fromkeys(variants, 0.0)
    steps: list[dict[str, str]] = []
    for cost in costs:
        before, reached = {}, {}
        for v in variants:
            u = min(variants, key=lambda u: (totals[u] + MARGIN * (u != v), u != v, variants.index(u)))
            before[v], reached[v] = u, totals[u] + MARGIN * (u != v and bool(steps)) + cost[v]
        totals = reached
        steps.append(before)
    path = [min(variants, key=lambda v: (totals[v], variants.index(v)))]
    for before in steps[:0:-1]:
        path.append(before[path[-1]])
    return path[::-1]


def _zero(a: int, b: int, at_a: float, at_b: float) -> int:
    """Return the last size before the line from ``at_a`` to ``at_b``, over log size, crosses zero."""
    share = -at_a / (at_b - at_a) if at_a < 0 < at_b else 0.5
    return min(max(math.floor(a * (b / a) ** share), a), b - 1)
