# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""CUDA graphs of several plans: every graph that a pass can ask for is captured at start-up, and no other.

vLLM captures a model by calling it once for every size. What it keeps differs by mode:

*FULL* graphs hold a whole forward pass and are replayed without calling the model. vLLM captures them with
the attention metadata of the passes that will replay them, so routing as usual puts the right plan in.

*PIECEWISE* graphs lie inside each compiled plan, between its attention layers, and are replayed by running
the plan. One size serves passes of several phases, hence several plans, but the metadata of the capturing
call (there may be none) shows at most one of them. So the first pass of a size captures all plans that the
policy can take at that size. Whether a plan's graphs exist is read off vLLM's own wrappers, since vLLM
captures twice: to estimate the memory, dropping those graphs, and then for good. The scheduler's passes
capture nothing: should a graph be missing then, the pass runs without, with a warning.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.config import CUDAGraphMode
from vllm.logger import init_logger

from flexquant.serving.vllm_api import (
    BatchDescriptor,
    CUDAGraphWrapper,
    ForwardContext,
    IntermediateTensors,
    monitor,
    override_forward_context,
)

logger = init_logger("vllm.flexquant.graphs")


class PlanGraphs:
    """The CUDA graphs of a model's plans."""

    def __init__(self, *, has_full: bool) -> None:
        """``has_full``: whether vLLM captures FULL graphs."""
        self._has_full = has_full
        self._wrappers: dict[str, list[CUDAGraphWrapper]] = {}
        self._memory: GraphMemory | None = GraphMemory()
        self._missing: set[tuple[str, BatchDescriptor | None]] = set()

    @contextmanager
    def compiling(self, plan: str) -> Iterator[None]:
        """The plan's first run, in which vLLM compiles it and wraps its pieces for PIECEWISE graphs."""
        before = set(CUDAGraphWrapper._all_instances)
        yield
        made = [wrapper for wrapper in CUDAGraphWrapper._all_instances if wrapper not in before]
        self._wrappers.setdefault(plan, []).extend(made)

    def capture_missing(
        self,
        plans: Mapping[str, nn.Module],
        reachable: Iterable[str],
        context: ForwardContext,
        inputs: tuple[Any, ...],
        tokens: int,
    ) -> None:
        """In a PIECEWISE pass of ``tokens`` padded tokens: capture the plans that have no graphs of its size.

        ``reachable`` names those that the policy can take at that size.
        """
        if not monitor.cudagraph_capturing_enabled or self._memory is None:
            return
        for name in reachable:
            if self._has_graphs(name, context.batch_descriptor):
                continue
            # Kernels load, and choose their configuration, in a run that is not captured.
            with _without_graphs(context):
                plans[name](*inputs)
            self._memory.sample()
            plans[name](*inputs)
            self._memory.captured(name, CUDAGraphMode.PIECEWISE, tokens)
            self._memory.sample()

    def replay(
        self, name: str, plan: nn.Module, context: ForwardContext, inputs: tuple[Any, ...]
    ) -> torch.Tensor | IntermediateTensors:
        """In a PIECEWISE pass: run a plan, its pieces from their graphs if it has some of this size."""
        if self._has_graphs(name, context.batch_descriptor):
            return plan(*inputs)
        if (name, context.batch_descriptor) not in self._missing:
            self._missing.add((name, context.batch_descriptor))
            logger.warning(
                "plan %s has no CUDA graphs for %s, which is a bug of FlexQuant: such passes run without",
                name,
                context.batch_descriptor,
            )
        with _without_graphs(context):
            return plan(*inputs)

    def _has_graphs(self, name: str, descriptor: BatchDescriptor | None) -> bool:
        """Whether a plan's pieces are captured for a size; also if it has none that could be.

        A piece need not have a graph (some hold no operator), so that several may have to be asked: the one
        that had the answer is asked first the next time.
        """
        wrappers = self._wrappers[name]
        for position, wrapper in enumerate(wrappers):
            if descriptor in wrapper.concrete_cudagraph_entries:
                wrappers.insert(0, wrappers.pop(position))
                return True
        return not wrappers

    def watch_full_capture(self, plan: str, tokens: int) -> None:
        """Note that ``plan`` runs a pass of ``tokens`` padded tokens, in a FULL capture or its warm-up."""
        if self._memory is None or not self._has_full:
            return
        if torch.cuda.is_current_stream_capturing():
            self._memory.captured(plan, CUDAGraphMode.FULL, tokens)
        else:
            self._memory.sample()

    def finish(self) -> None:
        """Serving begins: log what was captured, once, and capture nothing more."""
        if self._memory is not None:
            self._memory.log()
            self._memory = None


@contextmanager
def _without_graphs(context: ForwardContext) -> Iterator[None]:
    eager = copy.copy(context)
    eager.cudagraph_runtime_mode = CUDAGraphMode.NONE
    with override_forward_context(eager):
        yield


class GraphMemory:
    """Device memory taken by the graphs of each plan: what is free before and after a capture.

    What a FULL capture took is known at the next sample only, since none can be taken while it lasts. A graph
    that vLLM captures twice counts once.
    """

    def __init__(self) -> None:
        self._bytes: dict[tuple[str, str, int], int] = {}
        """By mode, plan and tokens."""
        self._free = 0
        self._pending: tuple[str, str, int] | None = None

    def sample(self) -> None:
        """Outside of a capture: charge what was taken since the last sample to the capture in between."""
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
        """Log the bytes of each plan's graphs; if the last is a FULL one, the smallest, it counts nothing."""
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
