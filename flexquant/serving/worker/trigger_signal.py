# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Compute the signal of a policy's trigger: one number for each decode pass, on the device, from its logits.

The logits are the model's, before temperature, penalties and masks. p is their softmax in float32, from which
a sequence's next token is sampled at temperature 1:

    entropy         -sum p ln p                in nats, from 0 to the logarithm of the vocabulary's size
    inverse_margin  1 / (largest p - second)   from 1; infinite if two tokens are equally likely

The mean, the maximum or a quantile (interpolated linearly) combines the sequences' numbers into the pass's
signal. A NaN logit makes its sequence's number and the signal NaN, which counts as unsure.

Nothing waits for the signal. While a pass is prepared on the host, the pass before can still run on the
device. So, on every device, the plan of a decode pass depends on the signals of all decode passes but the one
just before it, and the copy that is read then was started a whole pass earlier. The first tensor-parallel
rank sends its signal to the others, also on the device: all ranks read the same bits, even if only the first
has the logits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from flexquant.policy.trigger import SignalTrigger
from flexquant.serving.vllm_api import get_tp_group


class Signals:
    """The signals of decode passes that are being copied from the device."""

    def __init__(self, trigger: SignalTrigger) -> None:
        self._trigger = trigger
        self._sent: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()
        self._has_begun = self._is_due = False

    def begin_pass(self, is_decode: bool) -> None:
        """Note that a pass of the scheduler begins; if it decodes, the next logits belong to it."""
        self._has_begun, self._is_due = True, is_decode

    def measure(self, logits: torch.Tensor | None, device: torch.device) -> None:
        """Compute and send the signal, if ``logits`` [sequences, vocabulary] belong to a decode pass.

        The logits are None on a rank that does not gather them. Before the first pass the signal is computed
        and dropped, so that vLLM's profiling counts its memory.
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
        """Yield the signals of all decode passes but the last; each signal is yielded once."""
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
