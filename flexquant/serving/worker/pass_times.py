# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Time forward passes, from the description of the batch until the logits are requested.

On a GPU both moments are events in its stream, which are read once they have passed, so nothing waits for the
GPU. A CPU computes synchronously, so the clock is read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Label = TypeVar("Label")


class PassClock(Generic[Label]):
    """Times successive passes; a pass whose logits nobody requests has no time."""

    def __init__(self, device: torch.device, timed: Callable[[Label, float], None]) -> None:
        """Time passes; ``timed`` is called with :meth:`end`'s label and the seconds, on a GPU with delay."""
        self._timed = timed
        self._device = None if device.type == "cpu" else device
        self._began: float | torch.Event | None = None
        self._under_way: deque[tuple[Label, torch.Event, torch.Event]] = deque()

    def begin(self) -> None:
        """Note that a pass begins."""
        self._began = time.perf_counter() if self._device is None else self._event()

    def end(self, label: Label) -> None:
        """Note that the pass that began last has ended; a second call does nothing."""
        began, self._began = self._began, None
        if isinstance(began, float):
            self._timed(label, time.perf_counter() - began)
        elif began is not None:
            self._under_way.append((label, began, self._event()))
            while self._under_way and self._under_way[0][2].query():
                passed, first, last = self._under_way.popleft()
                self._timed(passed, first.elapsed_time(last) / 1000)

    def _event(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event
