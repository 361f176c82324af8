# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Decide from samples which variant runs passes of which size, for a goal and within constraints.

A goal is latency, throughput, both in balance, or bounds on TTFT and TPOT. A constraint says which candidates
can be loaded together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from flexquant.errors import FlexQuantError, UsageError
from flexquant.tuning.samples import MEASURED_PHASES, Samples
from flexquant.tuning.size_thresholds import MARGIN, Decision, choose_by_size, fastest, relative_speed

OBJECTIVES = ("balanced", "latency", "throughput")
WORTH_LOADING = 0.05
"""Objective balanced: a variant is loaded if some size would be slower by this share without it."""
UNMET = 10.0
"""Cost of missing a bound; it exceeds the cost of any precision."""
DURATION = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*(ms|s)")
PHASE_OF = {"ttft": "prefill", "tpot": "decode"}


@dataclass(frozen=True)
class Slo:
    """Upper bounds, in seconds, on a prefill pass (``ttft``) and a decode pass (``tpot``); None: no bound."""

    ttft: float | None = None
    tpot: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Read e.g. ``ttft=300ms,tpot=30ms``; raise UsageError for anything else."""
        found: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            match = DURATION.fullmatch(value.strip())
            if name not in PHASE_OF or name in found or match is None or float(match[1]) == 0:
                raise UsageError(
                    f"'{part.strip()}' in --slo is not a bound; write ttft=300ms, tpot=30ms or both, "
                    "with a comma between them"
                )
            found[name] = float(match[1]) / (1000 if match[2] == "ms" else 1)
        return cls(**found)

    def bound(self, phase: str) -> float | None:
        return self.ttft if phase == "prefill" else self.tpot

    def __str__(self) -> str:
        bounds = {"ttft": self.ttft, "tpot": self.tpot}
        return ",".join(f"{name}={1e3 * value:g}ms" for name, value in bounds.items() if value is not None)


@dataclass(frozen=True)
class Goal:
    """What the policy is optimised for: an objective of OBJECTIVES, or bounds in its place."""

    objective: str = "balanced"
    slo: Slo | None = None
    request_tokens: int = 2048
    """Tokens of a request, prompt and answer together; for throughput, which depends on how many fit."""

    def __str__(self) -> str:
        return str(self.slo) if self.slo else self.objective


def decide(
    samples: Samples,
    variants: Sequence[str],
    goal: Goal,
    requests: Callable[[Sequence[str]], int],
    together: Sequence[Sequence[str]] | None = None,
) -> Decision:
    """Return the best decision for the goal; raise FlexQuantError if none meets it.

    ``variants`` begin with the most precise; ``requests(variants)`` returns how many requests fit into memory
    beside these. ``together`` are sets of variants that can be loaded together, the preferred first; None:
    all can.
    """

    def of_set(names: Sequence[str]) -> Decision:
        if goal.slo is not None:
            return meet(samples, names, goal.slo)
        return optimise(samples, names, goal.objective, requests)

    return best(samples, [variants] if together is None else together, of_set)


def optimise(
    samples: Samples, variants: Sequence[str], objective: str, requests: Callable[[Sequence[str]], int]
) -> Decision:
    """Return the best decision for an objective of OBJECTIVES; ``variants`` begin with the most precise.

    ``latency`` takes the fastest variant at every size. ``balanced`` does the same with only the variants
    that are WORTH_LOADING. ``throughput`` takes the variants that decode most tokens a second at the largest
    batch that fits beside them, or fewer variants within MARGIN of that; ``requests(variants)`` returns how
    many requests fit.
    """
    if objective == "throughput":
        variants = _most_throughput(samples, variants, requests)
    elif objective == "balanced":
        variants = _worth_loading(samples, variants)
    return _fastest(samples, variants)


def best(
    samples: Samples, together: Sequence[Sequence[str]], of_set: Callable[[Sequence[str]], Decision]
) -> Decision:
    """Return the decision of the first of several sets of variants, unless another's passes are faster.

    Others are faster if their passes of all sizes are, in the geometric mean, by more than MARGIN. A set for
    which ``of_set`` raises FlexQuantError is left out; if all are, the first one's error is raised.
    """
    found: list[tuple[float, Decision]] = []
    refused: FlexQuantError | None = None
    for variants in together:
        try:
            decision = of_set(variants)
        except FlexQuantError as e:
            refused = refused or e
            continue
        times = [
            math.log(samples.time(decision.variant(phase, size), phase, size).median)
            for phase in MEASURED_PHASES
            for size in samples.sizes(phase)
        ]
        found.append((fmean(times), decision))
    if not found:
        assert refused is not None
        raise refused
    least = min(time for time, _ in found)
    return next(decision for time, decision in found if time <= least + MARGIN)


def meet(samples: Samples, variants: Sequence[str], slo: Slo) -> Decision:
    """Choose for every size the most precise variant that keeps the bound, or the fastest if none does.

    Raises FlexQuantError for bounds that not even the smallest pass keeps.
    """
    unmet = []
    for name, phase in PHASE_OF.items():
        bound = slo.bound(phase)
        size = samples.sizes(phase)[0]
        best = min(variants, key=lambda v: samples.time(v, phase, size).median)
        nearest = samples.time(best, phase, size).median
        if bound is not None and nearest > bound:
            unit = "sequence(s)" if phase == "decode" else "tokens"
            unmet.append(
                f"{name}={1e3 * bound:g}ms cannot be met: a {phase} pass of {size} {unit} takes "
                f"{1e3 * nearest:.3g} ms with the fastest variant, {best}; ask for {name}="
                f"{math.ceil(1e3 * nearest * (1 + MARGIN))}ms or more"
            )
    if unmet:
        raise FlexQuantError(". ".join(unmet))
    speed = fastest(samples, variants)

    def cost(phase: str, variant: str, size: int) -> float:
        bound = slo.bound(phase)
        if bound is None:
            return speed(phase, variant, size)
        if samples.time(variant, phase, size).median > bound:
            return UNMET + speed(phase, variant, size)
        return MARGIN * 2 * variants.index(variant)

    def crossing(phase: str, a: str, b: str, size: int) -> float:
        bound = slo.bound(phase)
        if bound is None:
            return math.log(samples.compare(a, b, phase, size).ratio)
        return math.log(samples.time(a, phase, size).median / bound)

    return choose_by_size(samples, variants, cost, crossing)


def largest_within(samples: Samples, decision: Decision, phase: str, bound: float) -> int:
    """Return the largest size up to which the chosen variants keep a bound; the smallest if none does."""
    sizes = samples.sizes(phase)
    kept = sizes[0]
    for size in sizes:
        if samples.time(decision.variant(phase, size), phase, size).median > bound:
            break
        kept = size
    return kept


def _fastest(samples: Samples, variants: Sequence[str]) -> Decision:
    return choose_by_size(samples, variants, fastest(samples, variants), relative_speed(samples))


def _worth_loading(samples: Samples, variants: Sequence[str]) -> list[str]:
    """Drop variants one at a time, the least missed first, while dropping costs less than WORTH_LOADING."""
    kept = list(_fastest(samples, variants).variants)
    kept.sort(key=variants.index)
    while len(kept) > 1:
        losses = {v: _loss_without(samples, kept, v) for v in kept}
        least = min(kept, key=lambda v: losses[v])
        if losses[least] >= math.log1p(WORTH_LOADING):
            break
        kept.remove(least)
    return kept


def _loss_without(samples: Samples, variants: Sequence[str], left_out: str) -> float:
    """Return the logarithm of the slowdown, at the worst size, without a variant."""
    others = [v for v in variants if v != left_out]
    return max(
        min(math.log(samples.compare(v, left_out, phase, size).ratio) for v in others)
        for phase in MEASURED_PHASES
        for size in samples.sizes(phase)
    )


def _most_throughput(
    samples: Samples, variants: Sequence[str], requests: Callable[[Sequence[str]], int]
) -> list[str]:
    subsets = [s for n in range(1, len(variants) + 1) for s in combinations(variants, n)]
    speeds = {s: _decode_throughput(samples, s, requests(s)) for s in subsets}
    best = max(speeds.values())
    if best == 0:
        raise FlexQuantError(
            "no variant leaves room in memory for one request; lower --request-tokens, or use more devices"
        )
    return list(next(s for s, speed in speeds.items() if speed >= best / (1 + MARGIN)))


def _decode_throughput(samples: Samples, variants: Sequence[str], requests: int) -> float:
    """Return decoded tokens a second at the largest measured batch up to ``requests``; 0 if none fits."""
    fitting = [n for n in samples.sizes("decode") if n <= requests]
    if not fitting:
        return 0.0
    return fitting[-1] / min(samples.time(v, "decode", fitting[-1]).median for v in variants)
