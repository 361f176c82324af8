# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Write the files of a tuning run: the policy as commented YAML, a plot, and samples while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.output import staged_file
from flexquant.documents.figures import MatplotlibMissing, new_figure
from flexquant.documents.yaml_document import to_yaml
from flexquant.errors import UsageError
from flexquant.policy.pass_times import UNITS, PassTimes, format_times
from flexquant.policy.rules import Policy, add_derivations, parse_policy
from flexquant.policy.schema import SCHEMA
from flexquant.tuning.deciding import Decision


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
    """Result of a run."""

    document: JsonObject
    """The policy as data."""
    decision: Decision
    times: PassTimes
    notes: list[str]
    """Sentences for the user: where the times were measured, crossovers, what was left out and why."""


def tuned_policy_document(
    decision: Decision, candidates: Mapping[str, Policy], times: PassTimes, goal: str
) -> JsonObject:
    """Return the policy as data; ``candidates`` hold the derivations of derived variants."""
    description = {"schema": SCHEMA, "description": f"tuned for {goal}: {describe_decision(decision)}"}
    document = {
        **add_derivations(description, decision.variants, candidates),
        "rules": _rules(decision),
        "measured": times.to_data(),
    }
    parse_policy(document, "the tuned policy")
    return document


def write_files(output: TuningFiles, tuned: TuningResult, title: str) -> list[Path]:
    """Write the policy and, if matplotlib is installed, the plot with ``title``; return their paths.

    In the policy's file, comments with the notes and a table of the times come first. Both files appear once
    both are complete.
    """
    comments = [*tuned.notes, "", *format_times(tuned.times, tuned.decision.variant)]
    text = "\n".join(f"# {line}".rstrip() for line in comments)
    files = [output.policy]
    with staged_file(output.policy) as policy:
        policy.write_text(f"{text}\n{to_yaml(tuned.document, compact=True)}", encoding="utf-8")
        try:
            with staged_file(output.plot) as plot:
                save_tuning_plot(tuned.times, tuned.decision, title, plot)
            files.append(output.plot)
        except MatplotlibMissing:
            pass
    return files


def describe_decision(decision: Decision) -> str:
    """Return e.g. ``decode in w4a16 up to 12 sequences, then w8a8; prefill in w8a8``."""
    parts = []
    for phase, ranges in decision.ranges.items():
        steps = [
            r.variant if r.last is None else f"{r.variant} up to {r.last} {UNITS[phase]}" for r in ranges
        ]
        parts.append(f"{phase} in {', then '.join(steps)}")
    return "; ".join(parts)


def _rules(decision: Decision) -> list[JsonObject]:
    """Return the rules: for decode by batch size, for all other passes by tokens."""
    if len(decision.variants) == 1:
        return [{"use": decision.variants[0]}]
    rules: list[JsonObject] = []
    for r in decision.ranges["decode"]:
        when: JsonObject = {"phase": "decode"}
        if r.last is not None:
            when["batch_size"] = {"max": r.last}
        rules.append({"when": when, "use": r.variant})
    for r in decision.ranges["prefill"]:
        if r.last is not None:
            rules.append({"when": {"tokens": {"max": r.last}}, "use": r.variant})
        else:
            rules.append({"use": r.variant})
    return rules


def save_tuning_plot(times: PassTimes, decision: Decision, title: str, file: Path) -> None:
    """Draw decode and prefill side by side, with logarithmic axes, into the PNG ``file``.

    Raises MatplotlibMissing without matplotlib.
    """
    figure, canvas = new_figure(10, 4.5)
    panels = (("decode", "sequences", times.decode), ("prefill", "tokens", times.prefill))
    for axes, (phase, unit, curves) in zip(figure.subplots(1, 2), panels, strict=True):
        for marker, (variant, curve) in zip("osD^vPX", curves.items(), strict=False):
            medians = [1e3 * t.median for t in curve.values()]
            errors = [
                [1e3 * (t.median - t.low) for t in curve.values()],
                [1e3 * (t.high - t.median) for t in curve.values()],
            ]
            axes.errorbar(list(curve), medians, yerr=errors, marker=marker, capsize=3, label=variant)
        for r in decision.ranges[phase]:
            if r.last is not None:
                axes.axvline(r.last + 0.5, color="gray", linestyle="--")
                axes.annotate(f"{r.last}", (r.last, 0.97), xycoords=axes.get_xaxis_transform(), ha="right")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda size, _: f"{size:g}")
        axes.set_xlabel(f"{unit} in a {phase} pass")
        axes.set_ylabel("ms")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    canvas.print_figure(file, format="png")
