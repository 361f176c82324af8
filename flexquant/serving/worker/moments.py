# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Count passes, for policies that tell moments of decoding apart.

vLLM describes its scheduler's passes in the same way to every rank, and only these are counted, so all ranks
count alike. A policy that is taken while requests are running begins to count anew, as if a prompt had just
been computed.
"""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING

from flexquant.policy.moments import Moment, count_since_prompt
from flexquant.policy.trigger import Schedule, SignalTrigger, Switch, Trigger

if TYPE_CHECKING:
    import torch

    from flexquant.policy.routes import RouteTable
    from flexquant.serving.worker.forward_pass import Pass


class RunningMoments:
    """Gives one pass after another its moment."""

    def __init__(self, trigger: Trigger | None) -> None:
        self._since_prompt = 0
        self._pattern = cycle(trigger.pattern) if isinstance(trigger, Schedule) else None
        self._signal: float | None = None
        self._signals = self._switch = None
        if isinstance(trigger, SignalTrigger):
            from flexquant.serving.worker.trigger_signal import Signals

            self._signals, self._switch = Signals(trigger), Switch(trigger)

    def place(self, begun: Pass, holds_prompt: bool) -> Pass:
        """Return the beginning pass with its moment (:func:`count_since_prompt`)."""
        decodes = begun.phase == "decode"
        if self._signals is not None:
            self._signals.begin_pass(decodes)
        self._since_prompt = count_since_prompt(self._since_prompt, begun.phase, holds_prompt)
        if not decodes:
            return begun._replace(moment=Moment(self._since_prompt, False))
        return begun._replace(moment=Moment(self._since_prompt, self._is_unsure()), signal=self._signal)

    def _is_unsure(self) -> bool:
        if self._pattern is not None:
            return next(self._pattern) == "1"
        if self._signals is None or self._switch is None:
            return False
        for signal in self._signals.arrived():
            self._signal = signal
            self._switch.take(signal)
        return self._switch.is_on

    def measure(self, logits: torch.Tensor | None, device: torch.device) -> None:
        """Take the computed logits (:meth:`Signals.measure`)."""
        if self._signals is not None:
            self._signals.measure(logits, device)


def running_moments(routes: RouteTable) -> RunningMoments | None:
    """Return a policy's counter of passes; None if the policy tells no moments apart."""
    return RunningMoments(routes.trigger) if routes.has_moments else None
