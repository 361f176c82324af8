# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Measure how much device memory the CUDA graphs of each plan take."""

from __future__ import annotations

import torch
from vllm.config import CUDAGraphMode
from vllm.logger import init_logger

logger = init_logger("vllm.flexquant.graphs")


class GraphMemory:
    """Device memory of each plan's graphs, from the free memory before and after a capture.

    The memory of a FULL capture is known only at the next sample, since none can be taken during a capture. A
    graph that vLLM captures twice counts once.
    """

    def __init__(self) -> None:
        self._bytes: dict[tuple[str, str, int], int] = {}
        """(Mode, plan, tokens) -> bytes."""
        self._free = 0
        self._pending: tuple[str, str, int] | None = None

    def sample(self) -> None:
        """Outside of a capture: attribute memory taken since the last sample to the capture in between."""
        free = torch.accelerator.get_memory_info()[0]
        if self._pending is not None:
            self._bytes[self._pending] = self._free - free
            self._pending = None
        self._free = free

    def captured(self, plan: str, mode: CUDAGraphMode, tokens: int) -> None:
        """Note a graph of ``plan`` for passes of ``tokens`` padded tokens."""
        self._pending = (mode.name, plan, tokens)
        self._bytes[self._pending] = 0

    def log(self) -> None:
        """Log the bytes of each plan's graphs; a FULL graph captured last, the smallest, is not counted."""
        for mode, plan in sorted({key[:2] for key in self._bytes}):
            taken = {tokens: size for (*which, tokens), size in self._bytes.items() if which == [mode, plan]}
            logger.info(
                "%s CUDA graphs of plan %s: %d sizes of %d to %d tokens, %.1f MiB",
                mode,
                plan,
                len(taken),
                min(taken),
                max(taken),
                sum(taken.values()) / 2**20,
            )
