# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Write sentences, for the terminal and the head of the file, that say what a tuned policy is based on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from flexquant.checkpoint.layer_ranges import format_bytes
from flexquant.checkpoint.model_config import JsonObject
from flexquant.measuring.comparison import EQUAL, FEWEST_ROUNDS, percent
from flexquant.policy.pass_times import UNITS, device_name
from flexquant.serving.cpu.kernels import STAND_INS
from flexquant.tuning.deciding import Decision, undecided
from flexquant.tuning.objectives import PHASE_OF, Goal, Slo, largest_within
from flexquant.tuning.samples import Samples


def origin_notes(origin: JsonObject, goal: Goal) -> list[str]:
    """Say where, when, with which versions and in how many rounds the times were measured."""
    return [
        f"Tuned on {origin['date']} for {goal}, on {device_name(origin)}.",
        " ".join(f"{name} {version}" for name, version in origin["versions"].items()),
        origin["command"],
        f"Medians of {origin['rounds']} rounds or more, with the smallest and the largest."
        if origin["rounds"] >= FEWEST_ROUNDS
        else f"Fewer than {FEWEST_ROUNDS} rounds: too few to compare the variants.",
    ]


def kernel_notes(kernels: Mapping[str, Sequence[str]]) -> list[str]:
    """Name the kernels of each variant, if the engines have reported them."""
    told = "; ".join(f"{variant} {', '.join(names)}" for variant, names in kernels.items())
    return [f"Kernels: {told}."] if told else []


def stand_in_notes(kernels: Mapping[str, Sequence[str]]) -> list[str]:
    """Warn of variants that run on a stand-in, as this machine has no fast kernel for them."""
    return [
        f"{variant} runs on {name}, {STAND_INS[name]}: its times say nothing about other machines."
        for variant, names in kernels.items()
        for name in names
        if name in STAND_INS
    ]


def crossover_notes(samples: Samples, variants: Sequence[str], decision: Decision) -> list[str]:
    """Say where a variant takes over from another, and which sizes are undecided."""
    notes = []
    for phase, ranges in decision.ranges.items():
        for r, following in pairwise(ranges):
            assert r.between is not None
            low, high = r.between
            text = f"takes over between the measured {low} and {high}"
            if equal := _equal(samples, r.variant, following.variant, phase):
                text += f"; {', '.join(equal)}"
            notes.append(
                f"{phase}: {r.variant} up to {r.last} {UNITS[phase]}, then {following.variant} ({text})."
            )
        if doubtful := undecided(samples, variants, phase):
            sizes = ", ".join(f"{size} (up to {percent(share)} apart)" for size, share in doubtful.items())
            notes.append(f"{phase}: undecided at these {UNITS[phase]}: {sizes}.")
    return notes


def bound_notes(samples: Samples, decision: Decision, slo: Slo | None) -> list[str]:
    """Say up to which size each bound is kept, and how long the next size takes."""
    notes = []
    for name, phase in PHASE_OF.items():
        bound = slo.bound(phase) if slo is not None else None
        if bound is None:
            continue
        sizes = samples.sizes(phase)
        kept = largest_within(samples, decision, phase, bound)
        text = f"{name}={1e3 * bound:g}ms is kept up to {kept} {UNITS[phase]}"
        if kept < sizes[-1]:
            size = sizes[sizes.index(kept) + 1]
            nearest = samples.time(decision.variant(phase, size), phase, size).median
            text += f", but not at {size}, where the nearest is {1e3 * nearest:.3g} ms"
        notes.append(f"{text}.")
    return notes


def batch_notes(samples: Samples, goal: Goal, requests: int) -> list[str]:
    """Say, for the objective throughput, if more requests fit into memory than were measured."""
    largest = samples.sizes("decode")[-1]
    if goal.slo is not None or goal.objective != "throughput" or requests <= largest:
        return []
    return [
        f"Throughput is that of {largest} sequences, the most that were measured; {requests} requests of "
        f"{goal.request_tokens} tokens fit into memory: --max-batch looks further."
    ]


def _equal(samples: Samples, a: str, b: str, phase: str) -> list[str]:
    """Return phrases for the sizes at which two variants cannot be told apart, with the bound on it."""
    found = {size: samples.compare(a, b, phase, size) for size in samples.sizes(phase)}
    return [f"{c.words()} at {size}" for size, c in found.items() if c.verdict == EQUAL]


def unused_notes(own_bytes: Mapping[str, int], decision: Decision) -> list[str]:
    """Say which variants are not used, and how many bytes of its ``own_bytes`` each saves."""
    return [
        f"{name} is never chosen and so not loaded, which leaves {format_bytes(size)} more for the KV cache."
        for name, size in own_bytes.items()
        if name not in decision.variants
    ]
