# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The results of a tuning run: the policy as commented YAML, with what it is based on, and a plot."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.weight_bytes import format_bytes
from flexquant.documents.results import new_figure
from flexquant.documents.yaml_document import to_yaml
from flexquant.errors import UsageError
from flexquant.evaluation.comparison import EQUAL, FEWEST_ROUNDS, percent
from flexquant.evaluation.engine import describe_command
from flexquant.policy.pass_times import UNITS, PassTimes, device_name, format_times
from flexquant.policy.rules import Policy, parse_policy, with_derivations
from flexquant.policy.schema import SCHEMA
from flexquant.serving.kernels import STAND_INS
from flexquant.tuning.measure import Measurement
from flexquant.tuning.objectives import BOUNDS, Decision, Goal
from flexquant.tuning.samples import MEASURED_PHASES, Samples, undecided

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class TuningFiles:
    """The paths of the files that a tuning run writes, all in the policy's folder."""

    policy: Path
    overwrite: bool = False
    """Whether an existing policy and plot may be replaced."""

    def __post_init__(self) -> None:
        """Raise :class:`UsageError` for paths that cannot or must not be written."""
        if self.policy.suffix not in (".yaml", ".yml"):
            raise UsageError(f"the output '{self.policy}' is no policy file; end its name in .yaml")
        for file in (self.policy, self.plot):
            if file.exists() and not self.overwrite:
                raise UsageError(f"{file} exists; give another --output, or --overwrite to replace it")
        if not self.policy.parent.is_dir():
            raise UsageError(f"the folder of {self.policy} does not exist; make it first")

    @property
    def plot(self) -> Path:
        return self.policy.with_suffix(".png")

    @property
    def sensitivity(self) -> Path:
        """The file of measured losses of plans, for a policy whose loss is limited."""
        return self.policy.with_suffix(".sensitivity.json")

    @property
    def samples(self) -> Path:
        """The file in which an unfinished run keeps its samples; it is removed at the end."""
        return self.policy.with_name(self.policy.name + ".samples.json")


@dataclass(frozen=True)
class TuningResult:
    document: JsonObject
    """The policy as data."""
    decision: Decision
    times: PassTimes
    notes: list[str]
    """Sentences for the user: where the times were measured, crossovers, what was left out and why."""


def tuned_policy(measured: Measurement, decision: Decision, goal: Goal) -> TuningResult:
    """Return the policy that follows from a decision, with the sentences that explain it."""
    samples, names = measured.samples, measured.names
    origin = {
        **{key: measured.run[key] for key in ("model", "machine", "versions", "engine_arguments")},
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["flexquant", *describe_command()[1:]]),
        "rounds": measured.grid.effort.rounds,
    }
    times = samples.pass_times(measured.grid.context, origin)
    notes = [
        *origin_notes(origin, goal),
        *kernel_notes(measured.kernels),
        *crossover_notes(samples, names, decision),
        *bound_notes(samples, decision, goal.slo),
        *batch_notes(samples, goal, lambda: measured.requests(decision.variants)),
        *unused_notes(measured.memory.saved(decision.variants)),
    ]
    document = tuned_policy_document(decision, measured.variants, times, str(goal))
    return TuningResult(document, decision, times, notes)


def tuned_policy_document(
    decision: Decision, candidates: Mapping[str, Policy], times: PassTimes, goal: str
) -> JsonObject:
    """Return the policy as data; ``candidates`` hold the plans and derivations of what was measured.

    Its times are those of the variants; a plan with layers of several is left to the comments.
    """
    uses = {name: policy.document["rules"][0]["use"] for name, policy in candidates.items()}
    document = {
        "schema": SCHEMA,
        "description": f"tuned for {goal}: {describe_decision(decision)}",
        "rules": rules_of(decision, uses),
        "measured": times.only([name for name in times.variants if uses.get(name, name) == name]).to_data(),
    }
    document = with_derivations(document, candidates.values())
    parse_policy(document, "the tuned policy")
    return document


def policy_text(tuned: TuningResult) -> str:
    """Return the policy as YAML, below comments with the notes and a table of the times."""
    return to_yaml(tuned.document, [*tuned.notes, "", *format_times(tuned.times, tuned.decision.variant)])


def describe_decision(decision: Decision) -> str:
    """Return e.g. ``decode in w4a16 up to 12 sequences, then w8a8; prefill in w8a8``."""
    told = []
    for phase, ranges in decision.ranges.items():
        found = (r.variant + (f" up to {r.last} {UNITS[phase]}" if r.last else "") for r in ranges)
        told.append(f"{phase} in {', then '.join(found)}")
    return "; ".join(told)


def rules_of(decision: Decision, uses: Mapping[str, str | JsonObject]) -> list[JsonObject]:
    """Return the rules: for decode by batch size, for all other passes by tokens."""
    if len(decision.variants) == 1:
        return [{"use": uses[decision.variants[0]]}]
    rules: list[JsonObject] = []
    for phase in MEASURED_PHASES:
        for r in decision.ranges[phase]:
            when: JsonObject = {"phase": "decode"} if phase == "decode" else {}
            if r.last is not None:
                when["batch_size" if phase == "decode" else "tokens"] = {"max": r.last}
            use = {"use": uses[r.variant]}
            rules.append({"when": when, **use} if when else use)
    return rules


def draw_times(tuned: TuningResult, title: str) -> Figure:
    """Draw decode beside prefill, with logarithmic axes; raise FlexQuantError without matplotlib."""
    figure = new_figure(10, 4.5)
    panels = (("decode", tuned.times.decode), ("prefill", tuned.times.prefill))
    for axes, (phase, curves) in zip(figure.subplots(1, 2), panels, strict=True):
        for marker, (variant, curve) in zip("osD^vPX", curves.items(), strict=False):
            medians = [1e3 * time.median for time in curve.values()]
            errors = [[1e3 * abs(time.median - time[end]) for time in curve.values()] for end in (1, 2)]
            axes.errorbar(list(curve), medians, yerr=errors, marker=marker, capsize=3, label=variant)
        for r in tuned.decision.ranges[phase]:
            if r.last is not None:
                axes.axvline(r.last + 0.5, color="gray", linestyle="--")
                axes.annotate(f"{r.last}", (r.last, 0.97), xycoords=axes.get_xaxis_transform(), ha="right")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda size, _: f"{size:g}")
        axes.set(yscale="log", xlabel=f"{UNITS[phase]} in a {phase} pass", ylabel="ms")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    return figure


def origin_notes(origin: JsonObject, goal: Goal) -> list[str]:
    """Say where, when, with which versions and in how many rounds the times were measured."""
    rounds = f"Medians of {origin['rounds']} rounds or more, with the smallest and the largest."
    if origin["rounds"] < FEWEST_ROUNDS:
        rounds = f"Fewer than {FEWEST_ROUNDS} rounds: too few to compare the variants."
    where = f"Tuned on {origin['date']} for {goal}, on {device_name(origin)}."
    versions = " ".join(f"{name} {version}" for name, version in origin["versions"].items())
    return [where, versions, origin["command"], rounds]


def kernel_notes(kernels: Mapping[str, Sequence[str]]) -> list[str]:
    """Name the kernels of each variant, if engines were started, and warn of stand-ins for fast ones."""
    told = "; ".join(f"{variant} {', '.join(names)}" for variant, names in kernels.items())
    notes = [f"Kernels: {told}."] if told else []
    for variant, names in kernels.items():
        for name in filter(STAND_INS.__contains__, names):
            stand_in = f"{variant} runs on {name}, {STAND_INS[name]}"
            notes.append(f"{stand_in}: its times say nothing about other machines.")
    return notes


def crossover_notes(samples: Samples, variants: Sequence[str], decision: Decision) -> list[str]:
    """Say where a variant takes over from another, and which sizes are undecided."""
    notes = []
    for phase, ranges in decision.ranges.items():
        sizes = samples.sizes(phase)
        for r, following in pairwise(ranges):
            assert r.between is not None
            low, high = r.between
            told = [f"takes over between the measured {low} and {high}"]
            compared = ((n, samples.compare(r.variant, following.variant, phase, n)) for n in sizes)
            if equal := [f"{c.words()} at {size}" for size, c in compared if c.verdict == EQUAL]:
                told.append(", ".join(equal))
            change = f"{r.variant} up to {r.last} {UNITS[phase]}, then {following.variant}"
            notes.append(f"{phase}: {change} ({'; '.join(told)}).")
        if doubtful := undecided(samples, variants, phase):
            listed = ", ".join(f"{size} (up to {percent(share)} apart)" for size, share in doubtful.items())
            notes.append(f"{phase}: undecided at these {UNITS[phase]}: {listed}.")
    return notes


def bound_notes(samples: Samples, decision: Decision, slo: Mapping[str, float]) -> list[str]:
    """Say up to which size each bound is kept, and how long the next size takes."""
    notes = []
    for phase, bound in slo.items():
        sizes = samples.sizes(phase)
        nearest = [samples.time(decision.variant(phase, size), phase, size).median for size in sizes]
        kept = max(1, next((n for n, time in enumerate(nearest) if time > bound), len(sizes)))
        text = f"{BOUNDS[phase]}={1e3 * bound:g}ms is kept up to {sizes[kept - 1]} {UNITS[phase]}"
        if kept < len(sizes):
            text += f", but not at {sizes[kept]}, where the nearest is {1e3 * nearest[kept]:.3g} ms"
        notes.append(f"{text}.")
    return notes


def batch_notes(samples: Samples, goal: Goal, requests: Callable[[], int]) -> list[str]:
    """Say, for the objective throughput, if more requests fit into memory than were measured."""
    largest = samples.sizes("decode")[-1]
    if goal.slo or goal.objective != "throughput" or (fitting := requests()) <= largest:
        return []
    measured = f"Throughput is that of {largest} sequences, the most that were measured"
    fits = f"{fitting} requests of {goal.request_tokens} tokens fit into memory"
    return [f"{measured}; {fits}: --max-batch looks further."]


def unused_notes(saved: Mapping[str, int]) -> list[str]:
    """Say which variants are not loaded, and how many bytes each saves."""
    left = {name: f"leaves {format_bytes(size)} more for the KV cache" for name, size in saved.items()}
    return [f"{name} is never chosen and so not loaded, which {leaves}." for name, leaves in left.items()]
