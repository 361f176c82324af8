# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Rounds over the grid: at every size the variants in turn, in an order that alternates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from flexquant.tuning.grid import Grid
from flexquant.tuning.samples import Samples


class Timer(Protocol):
    """A :class:`flexquant.tuning.workers.Worker`."""

    def call(self, method: str, *arguments: object) -> float: ...


class Rounds:
    """Measures what is missing in the samples, and has them saved after every size."""

    def __init__(
        self,
        names: Sequence[str],
        start: Callable[[], Mapping[str, Timer]],
        samples: Samples,
        grid: Grid,
        save: Callable[[], None],
        progress: Callable[[int, int], None],
    ) -> None:
        """``names``: of the variants; ``start`` is called once something is to be measured."""
        self._names = names
        self._start = start
        self._samples = samples
        self._grid = grid
        self._save = save
        self._progress = progress
        self._done = self._planned = 0

    def measure(self, rounds: int, decode: Sequence[int], prefill: Sequence[int]) -> None:
        """Measure until every size has been measured in ``rounds`` rounds, by all variants."""
        sizes = {"decode": decode, "prefill": prefill}
        missing = [
            [
                (phase, size)
                for phase in ("decode", "prefill")
                for size in sorted(sizes[phase])
                if self._count(phase, size) <= number
            ]
            for number in range(rounds)
        ]
        self._planned += sum(map(len, missing))
        for number, cells in enumerate(missing):
            names = self._names[:: -1 if number % 2 else 1]
            for phase, size in cells:
                for name in names:
                    self._samples.add(name, phase, size, self._time(name, phase, size))
                self._step()
            if cells and len(self._samples.context_seconds) <= number:
                self._samples.context_seconds.append(self._context_cost(names[0]))
                self._save()

    @functools.cached_property
    def _workers(self) -> Mapping[str, Timer]:
        return self._start()

    def _count(self, phase: str, size: int) -> int:
        return min(self._samples.count(name, phase, size) for name in self._names)

    def _time(self, name: str, phase: str, size: int) -> float:
        if phase == "prefill":
            return self._workers[name].call("prefill", size, self._grid.seconds)
        return self._workers[name].call("decode", size, self._grid.context, self._grid.seconds)

    def _context_cost(self, name: str) -> float:
        """Return what one more token in the KV cache adds to a decode pass of one sequence, in seconds."""
        grid = self._grid
        short, long = (
            self._workers[name].call("decode", 1, context, grid.seconds)
            for context in (grid.context, grid.long_context)
        )
        return (long - short) / (grid.long_context - grid.context)

    def _step(self) -> None:
        self._done += 1
        self._progress(self._done, self._planned)
        self._save()
