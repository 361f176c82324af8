# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Time forward passes, from the description of the batch until the logits are requested.

On a GPU both moments are events in its stream, which are read once they have passed, so nothing waits for the
GPU. Events are made before the passes and used again. A CPU computes synchronously, so the clock is read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Label = TypeVar("Label")
EVENTS = 16
"""Events that are made at first, for eight passes on a GPU; more are made only if it is further behind."""


class PassClock(Generic[Label]):
    """Times successive passes; a pass whose logits nobody requests has no time."""

    def __init__(self, device: torch.device, timed: Callable[[Label, float], None]) -> None:
        """Time passes; ``timed`` is called with their labels and the seconds, on a GPU with delay."""
        self._timed = timed
        self._device = None if device.type == "cpu" else device
        self._began: float | torch.Event | None = None
        self._ended: tuple[torch.Event, torch.Event] | float | None = None
        """Begin and end of the pass that ended last, or its seconds; None once it has a label."""
        self._under_way: deque[tuple[Label, torch.Event, torch.Event]] = deque()
        self._idle: list[torch.Event] = []
        if self._device is not None:
            self._idle = [self._record() for _ in range(EVENTS)]

    def begin(self) -> None:
        """Note that a pass begins."""
        if self._device is None:
            self._began = time.perf_counter()
        elif isinstance(self._began, torch.Event):
            self._began.record()
        else:
            self._began = self._record()

    def end(self) -> None:
        """Note that the pass that began last has ended; a second call does nothing."""
        began, self._began = self._began, None
        if isinstance(began, float):
            self._ended = time.perf_counter() - began
        elif began is not None:
            self._ended = began, self._record()

    def attribute(self, label: Label) -> None:
        """Give the pass that ended last its label; a second call does nothing."""
        times, self._ended = self._ended, None
        if isinstance(times, float):
            self._timed(label, times)
        elif times is not None:
            self._under_way.append((label, *times))
            while self._under_way and self._under_way[0][2].query():
                passed, first, last = self._under_way.popleft()
                self._timed(passed, first.elapsed_time(last) / 1000)
                self._idle += (first, last)

    def _record(self) -> torch.Event:
        """Return an event that is recorded now; the first record of an event makes it on the device."""
        event = self._idle.pop() if self._idle else torch.Event(self._device, enable_timing=True)
        event.record()
        return event
