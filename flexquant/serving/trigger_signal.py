# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The signal of a policy's trigger: one number for each decode pass, computed on the device from its logits.

The logits are the model's, before temperature, penalties and masks, and their softmax, in float32, is the
distribution that a sequence's next token is sampled from at temperature 1:

    entropy         -sum p ln p                in nats, from 0 to the logarithm of the vocabulary's size
    inverse_margin  1 / (largest p - second)   from 1; infinite where two tokens are the likeliest

The sequences' numbers become the pass's by their mean, maximum, or a quantile (interpolated linearly). A
logit that is no number makes its sequence's and the pass's none, which counts as unsure.

Nobody waits for it. While a pass is prepared on the host, the one before may still run on the device. So the
plan of a decode pass follows from the signals of all decode passes but the one just before it, on every
device alike, and the copy that is read then was asked for a whole pass ago. Of tensor-parallel ranks the
first tells the others, on the device too: all read the same bits, also where it alone has the logits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from flexquant.policy.trigger import SignalTrigger
from flexquant.serving.vllm_api import get_tp_group


class Signals:
    """The signals of decode passes, on their way from the device."""

    def __init__(self, trigger: SignalTrigger) -> None:
        self._trigger = trigger
        self._sent: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()
        self._has_begun = self._is_due = False

    def begin_pass(self, is_decode: bool) -> None:
        """A pass of the scheduler begins: if it decodes, the next logits are its."""
        self._has_begun, self._is_due = True, is_decode

    def measure(self, logits: torch.Tensor | None, device: torch.device) -> None:
        """Send the signal of the pass that decodes, if ``logits`` [sequences, vocabulary] are its.

        They are None on a rank that does not gather them. Before the first pass the signal is computed and
        dropped, so that vLLM's profiling counts the memory that it takes.
        """
        if self._has_begun and not self._is_due:
            return
        self._is_due = False
        if logits is None:
            signal = torch.empty((), dtype=torch.float32, device=device)
        else:
            signal = signal_of(logits, self._trigger)
        if self._has_begun:
            self._send(get_tp_group().broadcast(signal))

    def _send(self, signal: torch.Tensor) -> None:
        if not signal.is_cuda:
            self._sent.append((signal, None))
            return
        host = torch.empty((), dtype=torch.float32, pin_memory=True)
        host.copy_(signal, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._sent.append((host, copied))

    def arrived(self) -> Iterator[float]:
        """Yield the signals of all decode passes but the last, each once."""
        while len(self._sent) > 1:
            signal, copied = self._sent.popleft()
            if copied is not None:
                copied.synchronize()
            yield float(signal)


def signal_of(logits: torch.Tensor, trigger: SignalTrigger) -> torch.Tensor:
    """Return the signal of ``logits`` [sequences, vocabulary], a float32 scalar on their device."""
    p = torch.softmax(logits, -1, dtype=torch.float32)
    if trigger.signal == "entropy":
        values = torch.special.entr(p).sum(-1)  # [sequences]
    else:
        first, second = p.topk(2).values.unbind(-1)
        values = 1 / (first - second)
    if trigger.quantile is not None:
        return values.quantile(trigger.quantile)
    return values.amax() if trigger.aggregate == "max" else values.mean()
