# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""CUDA graphs without a GPU: vLLM's own wrappers, capture loops and dispatchers over graphs made in software.

A software graph records every operator of a capture with its tensors, and repeats the operators into the same
tensors at replay. What it shows: which plan is in which graph, what is replayed when, that nothing is
captured later, and that nothing asks the device for a value inside a capture. What it cannot show: memory,
streams, and kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import psutil
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm import SamplingParams
from vllm.compilation import cuda_graph
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.workspace import init_workspace_manager

from tests.gpu.conftest import INTERPRETED

Operator = tuple[Any, tuple[Any, ...], dict[str, Any], Any]
aten = torch.ops.aten
DEVICE_READS = {
    getattr(aten, name).default for name in ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero")
}
"""Operators whose result the host waits for: no CUDA graph can hold them."""


class SoftwareGraph:
    """Stands in for ``torch.cuda.CUDAGraph``."""

    capturing: ClassVar[SoftwareGraph | None] = None
    replays: ClassVar[list[SoftwareGraph]] = []
    """Every graph that was replayed, in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.operators: list[Operator] = []

    def replay(self) -> None:
        SoftwareGraph.replays.append(self)
        for function, arguments, options, outputs in self.operators:
            again = function(*arguments, **options)
            for old, new in zip(tree_leaves(outputs), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Recorder(TorchDispatchMode):
    def __init__(self, graph: SoftwareGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in DEVICE_READS:
            raise RuntimeError(f"{function} reads a value from the device while a graph is captured")
        outputs = function(*args, **(kwargs or {}))
        if not (function.is_view and share_memory(outputs, args)):
            self._graph.operators.append((function, args, kwargs or {}, outputs))
        return outputs


def share_memory(outputs: Any, inputs: Any) -> bool:
    """Return whether views see what is repeated into their bases: ``to`` and ``reshape`` may have copied."""
    bases = {t.untyped_storage().data_ptr() for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)}
    return all(t.untyped_storage().data_ptr() in bases for t in tree_leaves(outputs))


@contextmanager
def capture(graph: SoftwareGraph, *_: Any, **__: Any) -> Iterator[None]:
    """Stand in for ``torch.cuda.graph``."""
    assert SoftwareGraph.capturing is None, "captures cannot be nested"
    SoftwareGraph.capturing = graph
    try:
        with Recorder(graph):
            yield
    finally:
        SoftwareGraph.capturing = None


def install(patch: pytest.MonkeyPatch) -> None:
    """Let vLLM's runners capture and replay software graphs on a CPU, in this process."""
    patch.setattr(torch.cuda, "CUDAGraph", SoftwareGraph)
    patch.setattr(torch.cuda, "graph", capture)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: SoftwareGraph.capturing is not None)
    patch.setattr(torch.cuda, "mem_get_info", lambda *_: (psutil.virtual_memory().available, 0))
    patch.setattr(cuda_graph, "weak_ref_tensors", lambda tensors: tensors)
    patch.setattr(CpuPlatform, "support_static_graph_mode", classmethod(lambda _: True))
    wrapper = f"{CUDAGraphWrapper.__module__}.{CUDAGraphWrapper.__qualname__}"
    patch.setattr(CpuPlatform, "get_static_graph_wrapper_cls", classmethod(lambda _: wrapper))
    patch.setattr(CpuPlatform, "graph_pool_handle", staticmethod(lambda: (0, 1)), raising=False)
    patch.setattr(CpuPlatform, "_global_graph_pool", (0, 1), raising=False)
    patch.setattr(CPUAttentionMetadataBuilder, "_cudagraph_support", AttentionCGSupport.ALWAYS)
    _keep_compilation(patch)
    _wrap_the_model(patch)
    _capture_at_start(patch)
    if INTERPRETED:
        _keep_the_context(patch)


def _keep_compilation(patch: pytest.MonkeyPatch) -> None:
    """Keep the compile settings that the CPU platform, which knows no graphs, would replace."""
    check = CpuPlatform.check_and_update_config.__func__

    def checked(cls: type[CpuPlatform], vllm_config: VllmConfig) -> None:
        compilation, names = vllm_config.compilation_config, ("mode", "backend", "cudagraph_capture_sizes")
        kept = {name: getattr(compilation, name) for name in names}
        check(cls, vllm_config)
        for name, value in kept.items():
            setattr(compilation, name, value)

    patch.setattr(CpuPlatform, "check_and_update_config", classmethod(checked))


def _wrap_the_model(patch: pytest.MonkeyPatch) -> None:
    """Wrap the model for FULL graphs, as GPUModelRunner.load_model does and CPUModelRunner does not."""
    load, get = CPUModelRunner.load_model, CPUModelRunner.get_model

    def load_model(self: CPUModelRunner, *args: Any, **options: Any) -> None:
        load(self, *args, **options)
        if self.compilation_config.cudagraph_mode.has_full_cudagraphs():
            self.model = CUDAGraphWrapper(self.model, self.vllm_config, runtime_mode=CUDAGraphMode.FULL)

    def get_model(self: CPUModelRunner) -> Any:
        model = get(self)
        return model.unwrap() if isinstance(model, CUDAGraphWrapper) else model

    patch.setattr(CPUModelRunner, "load_model", load_model)
    patch.setattr(CPUModelRunner, "get_model", get_model)


def _capture_at_start(patch: pytest.MonkeyPatch) -> None:
    """Capture at the start, as gpu_worker.Worker.compile_or_warm_up_model does and CPUWorker does not."""
    warm_up = CPUWorker.compile_or_warm_up_model

    def compile_or_warm_up_model(self: CPUWorker) -> Any:
        times = warm_up(self)
        init_workspace_manager(torch.device("cpu"))
        if INTERPRETED:
            warm_up_v2(self)
        if self.model_runner.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
            self.model_runner.capture_model()
        return times

    patch.setattr(CPUWorker, "compile_or_warm_up_model", compile_or_warm_up_model)


def warm_up_v2(worker: CPUWorker) -> None:
    """Run vLLM's own requests, prompts and decode steps, as a GPU's worker does before it captures.

    They are sampled greedily, since Triton's interpreter does not run all of the sampler's kernels.
    """
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SamplingParams, "for_sampler_warmup", lambda: SamplingParams(temperature=0))
        warmup_kernels(worker.model_runner, worker.execute_model, lambda _: worker.sample_tokens(None))


def _keep_the_context(patch: pytest.MonkeyPatch) -> None:
    """Give FULL replays of the V2 runner a forward context, which a CPU's attention looks into.

    A GPU's kernels find what they need in the buffers that were captured.
    """
    from vllm.forward_context import set_forward_context
    from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    run = CudaGraphManager.run_fullgraph
    last: dict[str, Any] = {}

    def keeping(prepare: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_attn(self: Any, batch, mode, tables, slots, groups, kv, **o) -> Any:
            last["attn_metadata"] = prepare(self, batch, mode, tables, slots, groups, kv, **o)
            last["slot_mapping"] = build_slot_mappings_by_layer(slots, kv)
            return last["attn_metadata"]

        return prepare_attn

    def run_fullgraph(self: CudaGraphManager, descriptor: Any) -> Any:
        with set_forward_context(vllm_config=self.vllm_config, num_tokens=descriptor.num_tokens, **last):
            return run(self, descriptor)

    for kind in (DefaultModelState, MambaHybridModelState):
        patch.setattr(kind, "prepare_attn", keeping(kind.prepare_attn))
    patch.setattr(CudaGraphManager, "run_fullgraph", run_fullgraph)
