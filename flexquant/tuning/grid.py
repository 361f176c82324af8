# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Which passes are measured: sizes by phase, how often, how long."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from flexquant.errors import UsageError
from flexquant.tuning.pass_timer import MAX_STEPS


def powers_of_two(first: int, last: int) -> tuple[int, ...]:
    return tuple(2**i for i in range(first.bit_length() - 1, last.bit_length()))


SERVED_SEQUENCES = 256
SERVED_TOKENS = 2048
"""vLLM's defaults on most devices: what a pass may hold, which decides what is captured in CUDA graphs."""


@dataclass(frozen=True)
class Grid:
    decode: tuple[int, ...]
    """Sequences of the decode passes, ascending."""
    prefill: tuple[int, ...]
    """Tokens of the prefill passes, ascending."""
    context: int
    """Tokens of every sequence in the KV cache when decoding begins."""
    long_context: int
    """The same, of the passes from which the cost of a longer context is taken."""
    rounds: int
    seconds: float
    """Time for each pass in each round; a pass is repeated as often as that allows."""
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


CPU = Grid(powers_of_two(1, 64), powers_of_two(8, 1024), 16, 512, rounds=5, seconds=0.3, refine=True)
GPU = Grid(powers_of_two(1, 256), powers_of_two(8, 8192), 64, 4096, rounds=9, seconds=0.05, refine=True)
QUICK_CPU = Grid((1, 5, 24), (12, 40, 128), 8, 128, rounds=3, seconds=0.1, refine=False)
QUICK_GPU = Grid((1, 8, 32, 128), (16, 128, 1024, 4096), 64, 4096, rounds=5, seconds=0.05, refine=False)


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
