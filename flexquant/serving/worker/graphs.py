# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Capture CUDA graphs of several plans at start-up: every graph that a pass can need, and no other.

*FULL* graphs hold a whole forward pass and are replayed without calling the model. vLLM captures them with
the attention metadata of the passes that will replay them, so routing as usual puts the right plan in.

*PIECEWISE* graphs lie inside each compiled plan, between its attention layers, and are replayed by running
the plan. vLLM calls the model once for each size, for whatever phase, but several plans can run at that size:
FlexQuant captures them all then. vLLM's own wrappers tell whether a plan's graphs exist, since vLLM captures
twice: first to estimate the memory, dropping these graphs, and then for good. The scheduler's passes capture
nothing: if a graph is missing then, the pass runs without it, with a warning.

Another policy (`worker_extension`) can need other graphs. vLLM then captures again, while no pass runs.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger

from flexquant.policy.routes import RouteTable
from flexquant.policy.schema import Phase
from flexquant.serving.vllm_api import (
    BatchDescriptor,
    CUDAGraphWrapper,
    ForwardContext,
    IntermediateTensors,
    monitor,
    override_forward_context,
    set_current_vllm_config,
)

if TYPE_CHECKING:
    from flexquant.serving.vllm_api import gpu_model_runner, model_runner

    Runner = gpu_model_runner.GPUModelRunner | model_runner.GPUModelRunner
    """vLLM's V1 or V2 model runner."""

logger = init_logger("vllm.flexquant.graphs")


class PlanGraphs:
    def __init__(self) -> None:
        self._wrappers: dict[str, list[CUDAGraphWrapper]] = {}
        self._pieces: set[BatchDescriptor] = set()
        """Sizes of the PIECEWISE graphs."""
        self._full: dict[tuple[Phase, int], str] = {}
        """(Phase, padded tokens) -> plan of the FULL graph."""

    @contextmanager
    def compiling(self, plan: str) -> Iterator[None]:
        """Enclose a plan's first run, in which vLLM compiles it and wraps its pieces for PIECEWISE graphs."""
        before = set(CUDAGraphWrapper._all_instances)
        yield
        made = [wrapper for wrapper in CUDAGraphWrapper._all_instances if wrapper not in before]
        self._wrappers.setdefault(plan, []).extend(made)

    def capture_missing(
        self,
        plans: Mapping[str, nn.Module],
        reachable: Iterable[str],
        context: ForwardContext,
        inputs: Mapping[str, object],
    ) -> None:
        """In a PIECEWISE pass while vLLM captures, capture ``reachable`` plans without graphs of its size."""
        if not monitor.cudagraph_capturing_enabled:
            return
        if context.batch_descriptor is not None:
            self._pieces.add(context.batch_descriptor)
        for name in reachable:
            if not self._has_graphs(name, context.batch_descriptor):
                # A first run without capture loads kernels and lets them choose their configuration.
                with _without_graphs(context):
                    plans[name](**inputs)
                plans[name](**inputs)

    def replay(
        self, name: str, plan: nn.Module, context: ForwardContext, inputs: Mapping[str, object]
    ) -> torch.Tensor | IntermediateTensors:
        """In a PIECEWISE pass, run a plan, with its pieces' graphs if it has graphs of this size."""
        if self._has_graphs(name, context.batch_descriptor):
            return plan(**inputs)
        logger.warning_once(
            "plan %s has no CUDA graphs for %s, which is a bug of FlexQuant: such passes run without",
            name,
            context.batch_descriptor,
        )
        with _without_graphs(context):
            return plan(**inputs)

    def _has_graphs(self, name: str, descriptor: BatchDescriptor | None) -> bool:
        """Whether a plan's pieces are captured for a size, but for pieces without an operator."""
        wrappers = self._wrappers[name]
        for position, wrapper in enumerate(wrappers):
            if descriptor in wrapper.concrete_cudagraph_entries:
                wrappers.insert(0, wrappers.pop(position))
                return True
        return not wrappers

    def note_full(self, plan: str, phase: Phase, tokens: int) -> None:
        """Note that vLLM captures ``plan`` in a FULL graph for passes of ``tokens`` padded tokens."""
        self._full[phase, tokens] = plan

    def fit(self, routes: RouteTable) -> bool:
        """Whether the existing graphs hold the plans that ``routes`` give to the passes that replay them."""
        return all(routes.lookup(*cell).name == plan for cell, plan in self._full.items()) and all(
            self._has_graphs(plan.name, size)
            for size in self._pieces
            for plan in routes.reachable(size.num_tokens)
        )

    def capture_again(self, runner: Runner, vllm_config: VllmConfig) -> None:
        """Have vLLM capture the graphs that :meth:`fit` misses, by the model's routes; no pass may run.

        If it raises, graphs or pieces of a plan can be missing. FULL graphs, which vLLM tells apart by size
        only, are dropped first; PIECEWISE graphs stay. A capture writes into no KV cache or state.
        """
        torch.accelerator.synchronize()
        if (manager := getattr(runner, "cudagraph_manager", None)) is not None:
            manager.graphs.clear()
        for wrapper in CUDAGraphWrapper._all_instances:
            if wrapper.runtime_mode == CUDAGraphMode.FULL:
                wrapper.concrete_cudagraph_entries.clear()
        with set_current_vllm_config(vllm_config), no_blocks_of_requests(runner):
            runner.capture_model()

    def note_pieces(self) -> Callable[[], None]:
        """Return what drops PIECEWISE graphs noted since; vLLM would capture failed ones while serving."""
        wrappers = [*itertools.chain.from_iterable(self._wrappers.values())]
        before = [{*wrapper.concrete_cudagraph_entries} for wrapper in wrappers]

        def drop() -> None:
            for wrapper, kept in zip(wrappers, before, strict=True):
                for size in wrapper.concrete_cudagraph_entries.keys() - kept:
                    del wrapper.concrete_cudagraph_entries[size]

        return drop

    def do_without(self, runner: Runner) -> None:
        """Have vLLM run all passes without CUDA graphs from now on, and drop the existing graphs."""
        if not hasattr(runner, "cudagraph_manager"):
            runner.cudagraph_dispatcher.keys_initialized = False
        elif runner.cudagraph_manager is not None:
            runner.cudagraph_manager.graphs.clear()
            runner.cudagraph_manager._graphs_captured = False
        for wrapper in CUDAGraphWrapper._all_instances:
            wrapper.concrete_cudagraph_entries.clear()
        self._full.clear()
        self._pieces.clear()


@contextmanager
def no_blocks_of_requests(runner: Runner) -> Iterator[None]:
    """Point dummy passes at the null block, so that a capture cannot overwrite a request's state.

    The V1 runner gives them the requests' block tables, and layers write states into sequences' first blocks.
    """
    if hasattr(runner, "cudagraph_manager"):  # the V2 runner has tables for them
        yield
        return
    tables = [table.block_table.cpu for table in runner.input_batch.block_table.block_tables]
    kept = [table.clone() for table in tables]
    for table in tables:
        table.zero_()
    try:
        yield
    finally:
        for table, own in zip(tables, kept, strict=True):
            table.copy_(own)


@contextmanager
def _without_graphs(context: ForwardContext) -> Iterator[None]:
    eager = copy.copy(context)
    eager.cudagraph_runtime_mode = CUDAGraphMode.NONE
    with override_forward_context(eager):
        yield
