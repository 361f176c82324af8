# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The files that a tuning run writes: the policy as commented YAML, a plot, and samples meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexquant.checkpoint.output import staged_file
from flexquant.documents.yaml_document import to_yaml
from flexquant.errors import UsageError
from flexquant.policy.deriving import add_derivations
from flexquant.policy.pass_times import PassTimes
from flexquant.policy.rules import SCHEMA, Policy, parse_policy
from flexquant.policy.times_table import UNITS, format_times
from flexquant.tuning.deciding import Decision
from flexquant.tuning.plot import save_plot


@dataclass(frozen=True)
class Output:
    """The paths of the files that a tuning run writes, all in the policy's folder."""

    policy: Path
    overwrite: bool = False
    """Whether the policy and the plot may be there already."""

    def __post_init__(self) -> None:
        """Raise :class:`UsageError` for files that cannot or must not be written."""
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
        """What plans lose, where the policy may lose no more than so much."""
        return self.policy.with_suffix(".sensitivity.json")

    @property
    def samples(self) -> Path:
        """The file in which an unfinished run keeps what it has measured; it is removed at the end."""
        return self.policy.with_name(self.policy.name + ".samples.json")


@dataclass(frozen=True)
class Tuned:
    """What a run has decided."""

    document: dict[str, Any]
    """The policy."""
    decision: Decision
    times: PassTimes
    notes: list[str]
    """Sentences for the user: what was measured where, crossovers, what was left out and why."""


def policy_document(
    decision: Decision, candidates: Mapping[str, Policy], times: PassTimes, goal: str
) -> dict[str, Any]:
    """Return the policy as data; ``candidates`` tell how derived variants are derived."""
    description = {"schema": SCHEMA, "description": f"tuned for {goal}: {describe(decision)}"}
    document = {
        **add_derivations(description, decision.variants, candidates),
        "rules": _rules(decision),
        "measured": times.to_data(),
    }
    parse_policy(document, "the tuned policy")
    return document


def write_files(output: Output, tuned: Tuned, title: str) -> list[Path]:
    """Write the policy and, if matplotlib is there, the plot under ``title``; return their paths.

    The policy comes below the notes and a table of the times. Both appear when both are written.
    """
    comments = [*tuned.notes, "", *format_times(tuned.times, tuned.decision.variant)]
    text = "\n".join(f"# {line}".rstrip() for line in comments)
    files = [output.policy]
    with staged_file(output.policy) as policy:
        policy.write_text(f"{text}\n{to_yaml(tuned.document, compact=True)}", encoding="utf-8")
        try:
            with staged_file(output.plot) as plot:
                save_plot(tuned.times, tuned.decision, title, plot)
            files.append(output.plot)
        except ImportError:
            pass
    return files


def describe(decision: Decision) -> str:
    """Return e.g. ``decode in w4a16 up to 12 sequences, then w8a8; prefill in w8a8``."""
    parts = []
    for phase, ranges in decision.ranges.items():
        steps = [
            r.variant if r.last is None else f"{r.variant} up to {r.last} {UNITS[phase]}" for r in ranges
        ]
        parts.append(f"{phase} in {', then '.join(steps)}")
    return "; ".join(parts)


def _rules(decision: Decision) -> list[dict[str, Any]]:
    """Return the rules: decode by batch size, all other passes by tokens."""
    if len(decision.variants) == 1:
        return [{"use": decision.variants[0]}]
    rules: list[dict[str, Any]] = []
    for r in decision.ranges["decode"]:
        when: dict[str, Any] = {"phase": "decode"}
        if r.last is not None:
            when["batch_size"] = {"max": r.last}
        rules.append({"when": when, "use": r.variant})
    for r in decision.ranges["prefill"]:
        if r.last is not None:
            rules.append({"when": {"tokens": {"max": r.last}}, "use": r.variant})
        else:
            rules.append({"use": r.variant})
    return rules
