# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Rounds over the grid: at every size the variants in turn, in an order that alternates.

A decode round begins with the largest batch, once prefilled, and ends sequences on the way to the smallest.
"""

from __future__ import annotations

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
        workers: Mapping[str, Timer],
        samples: Samples,
        grid: Grid,
        save: Callable[[], None],
        progress: Callable[[int, int], None],
    ) -> None:
        self._workers = workers
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
                for size in sorted(sizes[phase], reverse=phase == "decode")
                if self._count(phase, size) <= number
            ]
            for number in range(rounds)
        ]
        self._planned += sum(map(len, missing))
        for number, cells in enumerate(missing):
            names = list(self._workers)[:: -1 if number % 2 else 1]
            batches = [size for phase, size in cells if phase == "decode"]
            if batches:
                self._decode(names, batches)
            for tokens in (size for phase, size in cells if phase == "prefill"):
                for name in names:
                    seconds = self._workers[name].call("prefill", tokens, self._grid.seconds)
                    self._samples.add(name, "prefill", tokens, seconds)
                self._step()
            if cells and len(self._samples.context_seconds) <= number:
                self._samples.context_seconds.append(self._context_cost(names[0]))
                self._save()

    def _count(self, phase: str, size: int) -> int:
        return min(self._samples.count(name, phase, size) for name in self._workers)

    def _decode(self, names: list[str], batches: list[int]) -> None:
        for name in names:
            self._workers[name].call("begin_decode", batches[0], self._grid.context)
        for batch in batches:
            for name in names:
                seconds = self._workers[name].call("decode", batch, self._grid.seconds)
                self._samples.add(name, "decode", batch, seconds)
            self._step()
        for name in names:
            self._workers[name].call("end_decode")

    def _context_cost(self, name: str) -> float:
        """Return what one more token in the KV cache adds to a decode pass of one sequence, in seconds."""
        worker, grid = self._workers[name], self._grid
        times = []
        for context in (grid.context, grid.long_context):
            worker.call("begin_decode", 1, context)
            times.append(worker.call("decode", 1, grid.seconds))
            worker.call("end_decode")
        return (times[1] - times[0]) / (grid.long_context - grid.context)

    def _step(self) -> None:
        self._done += 1
        self._progress(self._done, self._planned)
        self._save()
