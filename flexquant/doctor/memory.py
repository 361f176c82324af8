# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Check whether weights and KV cache fit into the memory that is free now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from flexquant.checkpoint.layer_ranges import describe_bytes, format_bytes
from flexquant.doctor.findings import Finding, Level
from flexquant.serving.kernels.cpu_kernels import TorchCPUInt4LinearKernel
from flexquant.serving.kernels.layers import kernel_of_layer
from flexquant.serving.vllm_api import AttentionLayerBase
from flexquant.serving.worker.weight_memory import WeightMemory, to_be_packed

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def examine_memory(vllm_config: VllmConfig, variants: Mapping[str, nn.Module]) -> Iterator[Finding]:
    """Yield how much memory the weights take on one rank, and how much is left for the KV cache.

    Weights count as stored in the checkpoint; an lm_head that a CPU's kernels pack counts twice, and each
    scale has a zero point beside it in PyTorch's INT4 kernel. Another kernel's layout can be a little larger.
    A variant that computes its weights in each pass takes memory to write them to.
    Memory of activations and CUDA graphs is unknown before a start.
    """
    memory = memory_of_weights(variants)
    sizes, by_layers = memory.nbytes(), memory.nbytes_by_range()
    weights = sum(sizes.values())
    text = f"{format_bytes(weights)} a rank: {describe_bytes(by_layers)}"
    yield Finding("ok", "weights", text, {"bytes": sizes, "bytes_by_layers": by_layers})
    per_token = cache_bytes_per_token(vllm_config)
    asked, free = asked_for_cache(vllm_config, weights), free_bytes()
    longest = vllm_config.model_config.max_model_len
    tokens = max(0, asked) // per_token
    text = (
        f"{format_bytes(asked)} for the KV cache are {tokens} tokens ({per_token} bytes each), "
        f"{tokens / longest:.1f} requests of {longest}; {format_bytes(free)} are free for it and the weights"
    )
    details = {"kv_cache_bytes": asked, "bytes_per_token": per_token, "tokens": tokens, "free_bytes": free}
    level: Level = "problem" if tokens < longest or weights + asked > free else "ok"
    advice = ""
    if level == "problem":
        advice = (
            ": too little; free memory, lower --max-model-len, or raise --gpu-memory-utilization "
            "(VLLM_CPU_KVCACHE_SPACE on a CPU), or take a policy of fewer variants"
        )
    yield Finding(level, "memory", text + advice, details)


def memory_of_weights(variants: Mapping[str, nn.Module]) -> WeightMemory:
    """Return what the weights of models that have none yet will take, as :func:`examine_memory` says."""
    for model in variants.values():
        _add_zero_points(model)
    return WeightMemory(variants, [m for model in variants.values() for m in to_be_packed(model)])


def _add_zero_points(model: nn.Module) -> None:
    """Add to a model without weights the zero points that PyTorch's INT4 kernel keeps beside the scales."""
    for module in list(model.modules()):
        if isinstance(kernel := kernel_of_layer(module), TorchCPUInt4LinearKernel):
            zeros = torch.empty_like(getattr(module, kernel.w_s_name), device="meta")
            module.register_parameter("flexquant_zero_points", nn.Parameter(zeros, requires_grad=False))


def attention_layers(vllm_config: VllmConfig) -> list[AttentionLayerBase]:
    """Return the attention layers of the built model; experts are registered beside them."""
    registered = vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in registered if isinstance(layer, AttentionLayerBase)]


def cache_bytes_per_token(vllm_config: VllmConfig) -> int:
    """Return the bytes that a token takes in the KV cache of all layers on one rank."""
    specs = [layer.get_kv_cache_spec(vllm_config) for layer in attention_layers(vllm_config)]
    return sum(spec.page_size_bytes // spec.block_size for spec in specs if spec is not None)


def asked_for_cache(vllm_config: VllmConfig, weights: int) -> int:
    """Return the KV cache's bytes: the requested ones, or what the weights leave of vLLM's memory share."""
    cache = vllm_config.cache_config
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
    else:
        import psutil

        total = psutil.virtual_memory().total
    return int(cache.gpu_memory_utilization * total) - weights


def free_bytes() -> int:
    """Return the free bytes on the GPU, or in the machine's memory without a GPU."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    import psutil

    return psutil.virtual_memory().available
