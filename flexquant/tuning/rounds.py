# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Which sizes are measured, and in which order: rounds over a grid, the variants in turn at every size."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from flexquant.errors import UsageError
from flexquant.measuring.comparison import Effort
from flexquant.measuring.pass_timer import MAX_STEPS
from flexquant.tuning.samples import Samples


def powers_of_two(first: int, last: int) -> tuple[int, ...]:
    return tuple(2**i for i in range(first.bit_length() - 1, last.bit_length()))


SERVED_SEQUENCES = 256
SERVED_TOKENS = 2048
"""vLLM's defaults on most devices: what a pass may hold, which decides what is captured in CUDA graphs."""


@dataclass(frozen=True)
class Grid:
    """The sizes of the passes that are measured, how often and for how long."""

    decode: tuple[int, ...]
    """Sequences of the decode passes, ascending."""
    prefill: tuple[int, ...]
    """Tokens of the prefill passes, ascending."""
    context: int
    """Tokens of every sequence in the KV cache when decoding begins."""
    long_context: int
    """The same, of the passes from which the cost of a longer context is taken."""
    effort: Effort
    seconds: float
    """Seconds for each pass in each round; a pass is repeated as often as that allows."""
    refine: bool
    """Whether sizes between the two on either side of a crossover are measured too."""

    def up_to(self, max_batch: int | None = None, max_tokens: int | None = None) -> Grid:
        """Return a grid whose largest sizes are the given ones; None: as they are."""
        decode = self.decode if max_batch is None else _up_to(self.decode, max_batch)
        prefill = self.prefill if max_tokens is None else _up_to(self.prefill, max_tokens)
        return replace(self, decode=decode, prefill=prefill)

    def fitting(self, max_length: int | None) -> Grid:
        """Return a grid whose sequences fit a model of at most ``max_length`` tokens; None: any length.

        Raises UsageError if such a model cannot be measured.
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

    def engine_options(self, max_length: int | None) -> dict[str, Any]:
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
    """Return a size to measure between two, or None where there is none worth it.

    The middle by ratio; from 16 on a multiple of 8, as vLLM's CUDA graphs have them.
    """
    middle = round(math.sqrt(smaller * larger))
    if middle > 16:
        middle = round(middle / 8) * 8
    return middle if smaller < middle < larger and larger / smaller >= 1.5 else None


def _up_to(sizes: Iterable[int], most: int) -> tuple[int, ...]:
    return (*(size for size in sizes if size < most), most)


class Timer(Protocol):
    """A :class:`flexquant.measuring.workers.Worker`."""

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

    def add(self, wide: Callable[[str], Sequence[int]]) -> None:
        """Measure the sizes that ``wide(phase)`` names, asked before every round, up to the most rounds."""
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
