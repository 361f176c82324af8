# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Decide from samples which variant runs passes of which size, for a goal.

A goal is latency, throughput, both in balance, or bounds on TTFT and TPOT. ``together`` says which candidates
can be loaded together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean

from flexquant.errors import FlexQuantError, UsageError
from flexquant.tuning.samples import Samples
from flexquant.tuning.size_thresholds import MARGIN, Decision, choose_by_size

OBJECTIVES = ("balanced", "latency", "throughput")
WORTH_LOADING = 0.05
"""Objective balanced: a variant is loaded if some size would be slower by this share without it."""
DURATION = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*(ms|s)")
BOUNDS = {"prefill": "ttft", "decode": "tpot"}
"""Phase -> name of the bound on its passes."""


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
            raise UsageError(
                f"'{part.strip()}' in --slo is not a bound; write ttft=300ms, tpot=30ms or both, "
                "with a comma between them"
            )
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

    ``latency`` takes the fastest variant at every size. ``balanced`` does the same with only the variants
    that are WORTH_LOADING. ``throughput`` takes the variants that decode most tokens a second at the largest
    batch that fits beside them, or fewer variants within MARGIN of that.
    """
    if goal.slo:
        return _meet(samples, variants, goal.slo)
    if goal.objective == "throughput":
        variants = _most_throughput(samples, variants, requests)
    elif goal.objective == "balanced":
        variants = _worth_loading(samples, variants)
    return choose_by_size(samples, variants)


def _meet(samples: Samples, variants: Sequence[str], slo: Mapping[str, float]) -> Decision:
    """Choose for every size the most precise variant that keeps the bound, or the fastest if none does.

    Raises FlexQuantError for bounds that not even the smallest pass keeps.
    """
    unmet = []
    for phase, bound in slo.items():
        size = samples.sizes(phase)[0]
        best = min(variants, key=lambda v: samples.time(v, phase, size).median)
        nearest = samples.time(best, phase, size).median
        if nearest > bound:
            name, unit = BOUNDS[phase], "sequence(s)" if phase == "decode" else "tokens"
            unmet.append(
                f"{name}={1e3 * bound:g}ms cannot be met: a {phase} pass of {size} {unit} takes "
                f"{1e3 * nearest:.3g} ms with the fastest variant, {best}; ask for {name}="
                f"{math.ceil(1e3 * nearest * (1 + MARGIN))}ms or more"
            )
    if unmet:
        raise FlexQuantError(". ".join(unmet))
    return choose_by_size(samples, variants, slo)


def _worth_loading(samples: Samples, variants: Sequence[str]) -> list[str]:
    """Drop variants one at a time, the least missed first, while dropping costs less than WORTH_LOADING."""
    kept = list(choose_by_size(samples, variants).variants)
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
        min(math.log(samples.compare(v, left_out, *one).ratio) for v in others) for one in samples.passes
    )


def _most_throughput(samples: Samples, variants: Sequence[str], requests: Requests) -> list[str]:
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
