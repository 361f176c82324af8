# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Define a policy's trigger, which decides when a decode pass is ``unsure``.

    experimental:
      trigger: {signal: entropy, aggregate: max, enter: 2.5, leave: 1.5, dwell: 8}

A signal is one number for each decode pass, computed from the logits of its sequences
(:mod:`flexquant.serving.worker.trigger_signal`). A schedule makes passes unsure whatever the logits are:
every fourth pass, a random half, or the passes that were unsure in the trace of another run.

    experimental:
      trigger: {schedule: "1000"}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Signal = Literal["entropy", "inverse_margin"]
SIGNALS: tuple[Signal, ...] = get_args(Signal)
Aggregate = Literal["mean", "max", "quantile"]
AGGREGATES: tuple[Aggregate, ...] = get_args(Aggregate)


@dataclass(frozen=True)
class SignalTrigger:
    """A trigger that turns on when the signal reaches ``enter``, and off when it falls below ``leave``."""

    signal: Signal
    """``entropy`` or ``inverse_margin``, computed for each sequence."""
    aggregate: Aggregate
    """``mean``, ``max`` or ``quantile``, which combines the signals of a pass's sequences into one number."""
    enter: float
    leave: float
    """Signal below which the trigger turns off; at most ``enter``."""
    dwell: int
    """Least number of passes between two changes of the trigger."""
    quantile: float | None = None
    """Quantile, 0 to 1, for the aggregate ``quantile``; None for others."""


@dataclass(frozen=True)
class Schedule:
    """A trigger that follows a repeated pattern."""

    pattern: str
    """A ``1`` for every unsure pass and a ``0`` for every other pass, from the first pass on."""


Trigger = SignalTrigger | Schedule


class Switch:
    """Turns on and off by one signal after another; passes are unsure while it is on."""

    def __init__(self, trigger: SignalTrigger) -> None:
        self._trigger = trigger
        self._stayed = trigger.dwell
        self.is_on = False

    def take(self, signal: float) -> None:
        """Take the next pass's signal; NaN counts as beyond ``enter``."""
        self._stayed += 1
        turns = signal < self._trigger.leave if self.is_on else not signal < self._trigger.enter
        if turns and self._stayed >= self._trigger.dwell:
            self.is_on, self._stayed = not self.is_on, 0


def describe_trigger(trigger: Trigger) -> str:
    """Return a phrase that says which passes are unsure."""
    if isinstance(trigger, Schedule):
        pattern = trigger.pattern
        short = pattern if len(pattern) <= 40 else f"{pattern[:40]}... ({len(pattern)} passes)"
        return f"decode passes by the pattern {short}"
    how = trigger.aggregate if trigger.quantile is None else f"quantile {trigger.quantile:g}"
    return (
        f"decode passes from {trigger.signal} ({how}) of at least {trigger.enter:g} until below "
        f"{trigger.leave:g}, either for at least {trigger.dwell} of them"
    )
