# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Measure sizes in rounds over a grid; at every size the variants take turns."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from flexquant.checkpoint.model_config import JsonObject
from flexquant.errors import UsageError
from flexquant.evaluation.comparison import Effort
from flexquant.evaluation.workers import MAX_STEPS
from flexquant.tuning.samples import Samples


def powers_of_two(first: int, last: int) -> tuple[int, ...]:
    return tuple(2**i for i in range(first.bit_length() - 1, last.bit_length()))


SERVED_SEQUENCES = 256
SERVED_TOKENS = 2048
"""vLLM's default limits of a pass on most devices; they decide which CUDA graphs are captured."""


@dataclass(frozen=True)
class Grid:
    """The sizes of passes to measure, how often and for how long."""

    decode: tuple[int, ...]
    """Sequences of the decode passes, ascending."""
    prefill: tuple[int, ...]
    """Tokens of the prefill passes, ascending."""
    context: int
    """Tokens of every sequence in the KV cache when decoding begins."""
    long_context: int
    """Tokens in the KV cache in the passes that measure the cost of a longer context."""
    effort: Effort
    seconds: float
    """Seconds for each size in each round, in which the pass is repeated."""
    refine: bool
    """Whether a size between the two on either side of a crossover is measured too."""

    def up_to(self, max_batch: int | None = None, max_tokens: int | None = None) -> Grid:
        """Return a grid with the given largest sizes; None leaves a largest size as it is."""
        decode = self.decode if max_batch is None else _up_to(self.decode, max_batch)
        prefill = self.prefill if max_tokens is None else _up_to(self.prefill, max_tokens)
        return replace(self, decode=decode, prefill=prefill)

    def fitting(self, max_length: int | None) -> Grid:
        """Return a grid for a model whose sequences have at most ``max_length`` tokens; None: no limit.

        Raises UsageError if ``max_length`` is too small to measure.
        """
        if max_length is None:
            return self
        longest = max_length - 2 * MAX_STEPS
        if longest <= self.context:
            raise UsageError(
                f"the model's sequences have at most {max_length} tokens, but tuning needs more than "
                f"{self.context + 2 * MAX_STEPS}; give a model with a larger max_position_embeddings"
            )
        shorter = self.up_to(max_tokens=min(self.prefill[-1], max_length - 1))
        return replace(shorter, long_context=min(self.long_context, longest))

    def engine_options(self, max_length: int | None) -> JsonObject:
        """Return vLLM's engine arguments for these sizes."""
        needed = max(self.prefill[-1] + 1, self.long_context + 2 * MAX_STEPS)
        return {
            "max_num_seqs": max(SERVED_SEQUENCES, self.decode[-1]),
            "max_num_batched_tokens": max(SERVED_TOKENS, self.prefill[-1], self.decode[-1]),
            "max_model_len": needed if max_length is None else min(needed, max_length),
            "enable_prefix_caching": False,
        }


CPU = Grid(powers_of_two(1, 64), powers_of_two(8, 1024), 16, 512, Effort(6, 12), seconds=0.3, refine=True)
GPU = Grid(powers_of_two(1, 256), powers_of_two(8, 8192), 64, 4096, Effort(9, 36), seconds=0.05, refine=True)
QUICK_CPU = Grid((1, 5, 24), (12, 40, 128), 8, 128, Effort(6, 12), seconds=0.1, refine=False)
QUICK_GPU = Grid((1, 8, 32, 128), (16, 128, 1024, 4096), 64, 4096, Effort(6, 12), seconds=0.05, refine=False)


def between(smaller: int, larger: int) -> int | None:
    """Return the geometric mean of two sizes, or None if they are too close for another measurement.

    Above 16 it is rounded to a multiple of 8, like the sizes of vLLM's CUDA graphs.
    """
    middle = round(math.sqrt(smaller * larger))
    if middle > 16:
        middle = round(middle / 8) * 8
    return middle if smaller < middle < larger and larger / smaller >= 1.5 else None


def _up_to(sizes: Iterable[int], most: int) -> tuple[int, ...]:
    return (*(size for size in sizes if size < most), most)


class Timer(Protocol):
    """The part of :class:`flexquant.evaluation.workers.Worker` that Rounds needs."""

    def call(self, method: str, *arguments: float) -> float: ...


class Rounds:
    """Measures the sizes that the samples lack, and calls ``save`` after every size."""

    def __init__(
        self,
        names: Sequence[str],
        start: Callable[[], Mapping[str, Timer]],
        samples: Samples,
        grid: Grid,
        save: Callable[[], None],
        progress: Callable[[int, int], None],
    ) -> None:
        """Prepare to measure the variants ``names``; ``start`` is called for the first measurement."""
        self._names = names
        self._start = start
        self._samples = samples
        self._grid = grid
        self._save = save
        self._progress = progress
        self._done = self._planned = 0

    def measure(self, rounds: int, decode: Sequence[int], prefill: Sequence[int]) -> None:
        """Measure until every size has been measured in ``rounds`` rounds, with all variants."""
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

    def add(self, wide: Callable[[str], Sequence[int]]) -> None:
        """Add rounds, up to the limit, over the sizes that ``wide(phase)`` returns before each round."""
        for rounds in range(self._grid.effort.rounds + 1, self._grid.effort.max_rounds + 1):
            decode, prefill = wide("decode"), wide("prefill")
            if not decode and not prefill:
                return
            self.measure(rounds, decode, prefill)

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
        """Return the seconds that one more token in the KV cache adds to a decode pass of one sequence."""
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
