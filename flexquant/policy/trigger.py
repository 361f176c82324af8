# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""When a decode pass is ``unsure``: the settings of a policy's trigger, and how it turns on and off.

    experimental:
      trigger: {signal: entropy, aggregate: max, enter: 2.5, leave: 1.5, dwell: 8}

A signal is one number for each decode pass, from the logits of its sequences
(:mod:`flexquant.serving.trigger_signal`). A schedule takes its place where passes are to be unsure whatever
the logits are: every fourth, a random half, or those that a trace says were so in another run.

    experimental:
      trigger: {schedule: "1000"}
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any

from flexquant.documents.yaml_document import Document, KeyPath, show

SIGNALS = ("entropy", "inverse_margin")
AGGREGATES = ("mean", "max", "quantile")
PATTERN = re.compile(r"[01]{1,100000}")
MAX = sys.float_info.max


@dataclass(frozen=True)
class SignalTrigger:
    """Passes are unsure from the signal's reaching ``enter`` until it is below ``leave``."""

    signal: str
    """One of :data:`SIGNALS`, of each sequence."""
    aggregate: str
    """One of :data:`AGGREGATES`: how those of a pass become one number."""
    enter: float
    leave: float
    """At most ``enter``."""
    dwell: int
    """Passes that it stays as it is, at least, whenever it has turned on or off."""
    quantile: float | None = None
    """With that aggregate, which: 0 to 1."""


@dataclass(frozen=True)
class Schedule:
    """Decode passes are unsure by a pattern, which is repeated."""

    pattern: str
    """A ``1`` for every pass that is, a ``0`` for every one that is not, in order from the first."""


Trigger = SignalTrigger | Schedule


class Switch:
    """Whether passes are unsure, by one signal after another."""

    def __init__(self, trigger: SignalTrigger) -> None:
        self._trigger = trigger
        self._stayed = trigger.dwell
        self.is_on = False

    def take(self, signal: float) -> None:
        """Take the next pass's signal; what is no number counts as one beyond ``enter``."""
        self._stayed += 1
        turns = signal < self._trigger.leave if self.is_on else not signal < self._trigger.enter
        if turns and self._stayed >= self._trigger.dwell:
            self.is_on, self._stayed = not self.is_on, 0


def read_trigger(value: Any, path: KeyPath, document: Document) -> Trigger:
    """Return the trigger at ``path``; raise FlexQuantError for anything else."""
    if isinstance(value, dict) and "schedule" in value:
        document.check_keys(value, path, ("schedule",))
        pattern = value["schedule"]
        if not isinstance(pattern, str) or not PATTERN.fullmatch(pattern):
            document.fail(
                (*path, "schedule"),
                f'is {show(pattern)}; give 1 to 100000 of the characters 0 and 1 in quotes, e.g. "1000"',
            )
        return Schedule(pattern)
    document.check_keys(value, path, ("signal", "aggregate", "enter"), ("leave", "dwell", "quantile"))
    signal, aggregate = (
        _choice(value[key], allowed, (*path, key), document)
        for key, allowed in (("signal", SIGNALS), ("aggregate", AGGREGATES))
    )
    enter = _number(value["enter"], (*path, "enter"), document)
    leave = _number(value.get("leave", enter), (*path, "leave"), document)
    if leave > enter:
        document.fail((*path, "leave"), f"is {leave}, above enter, which is {enter}; give at most that")
    dwell = value.get("dwell", 1)
    if not isinstance(dwell, int) or isinstance(dwell, bool) or dwell < 1:
        document.fail((*path, "dwell"), f"is {show(dwell)}; give a whole number of at least 1")
    quantile = None
    if aggregate == "quantile":
        if "quantile" not in value:
            document.fail(path, "lacks the key 'quantile', which that aggregate needs; add one from 0 to 1")
        quantile = _number(value["quantile"], (*path, "quantile"), document)
        if quantile > 1:
            document.fail((*path, "quantile"), f"is {quantile}; give a number from 0 to 1")
    elif "quantile" in value:
        document.fail(
            (*path, "quantile"), f"is for 'aggregate: quantile', but this one is {aggregate}; remove it"
        )
    return SignalTrigger(signal, aggregate, enter, leave, dwell, quantile)


def describe_trigger(trigger: Trigger) -> str:
    """Return for people which passes are unsure."""
    if isinstance(trigger, Schedule):
        pattern = trigger.pattern
        short = pattern if len(pattern) <= 40 else f"{pattern[:40]}... ({len(pattern)} passes)"
        return f"decode passes by the pattern {short}"
    how = trigger.aggregate if trigger.quantile is None else f"quantile {trigger.quantile:g}"
    return (
        f"decode passes from {trigger.signal} ({how}) of at least {trigger.enter:g} until below "
        f"{trigger.leave:g}, either for at least {trigger.dwell} of them"
    )


def _choice(value: Any, allowed: tuple[str, ...], path: KeyPath, document: Document) -> str:
    if not isinstance(value, str) or value not in allowed:
        document.fail(path, f"is {show(value)}; give one of {', '.join(allowed)}")
    return value


def _number(value: Any, path: KeyPath, document: Document) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX:
        document.fail(path, f"is {show(value)}; give a number of at least 0")
    return float(value)
