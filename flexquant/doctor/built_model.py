# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Say which kernels run a model that is built without weights, and whether it fits into memory."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import psutil
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from flexquant.checkpoint.merged_config import SHARED
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.weight_bytes import describe_bytes, format_bytes, head_remark
from flexquant.doctor import Finding
from flexquant.policy.routes import RouteTable
from flexquant.serving.kernels.cpu_kernels import REPLACED
from flexquant.serving.kernels.cpu_weight_only import TorchCPUInt4LinearKernel
from flexquant.serving.kernels.layers import (
    LinearKernel,
    expert_layers,
    experts_kernel_name,
    kernel_name,
    kernel_of_layer,
    linear_sizes,
    linears,
)
from flexquant.serving.vllm_api import (
    _POSSIBLE_FP8_KERNELS,
    _POSSIBLE_INT8_KERNELS,
    _POSSIBLE_KERNELS,
    AttentionLayerBase,
    MambaBase,
    MPLinearKernel,
    get_pp_group,
    is_supported_and_can_implement_kernel,
)
from flexquant.serving.worker.int8_head import Int8HeadMethod
from flexquant.serving.worker.weight_memory import IN_16_BIT, WeightMemory, multiplied, to_be_packed


def find_kernels(variant: str, model: nn.Module) -> Iterator[Finding]:
    """Yield a finding for each kernel of a variant that is built without weights.

    Under ``better``, a group of equal linears has kernels that vLLM prefers, and why it does not take them.
    """
    names = ("name", "inputs", "outputs", "kernel")
    shapes: dict[tuple[object, ...], JsonObject] = {}
    for path, layer in linears(model).items():
        group = (path.rsplit(".", 1)[-1], *linear_sizes(layer), kernel_name(layer))
        if group not in shapes:
            kernel = kernel_of_layer(layer)
            better = _better(kernel) if kernel else {}
            shapes[group] = {**dict(zip(names, group, strict=True)), "better": better, "layers": 0}
        shapes[group]["layers"] += 1
    for chosen in dict.fromkeys(shape["kernel"] for shape in shapes.values()):
        found = [shape for shape in shapes.values() if shape["kernel"] == chosen]
        which = ", ".join("{name} {inputs}x{outputs}".format(**shape) for shape in found)
        reasons = {name: why for shape in found for name, why in shape["better"].items()}
        rather = "".join(f"; not {name}: {why}" for name, why in reasons.items())
        text = f"{variant}: {chosen} for {which}{rather}"
        details = {"variant": variant, "kernel": chosen, "shapes": found}
        yield Finding("note" if reasons else "ok", "kernel", text, details)
    for chosen, layers in Counter(map(experts_kernel_name, expert_layers(model))).items():
        text = f"{variant}: {chosen} for the experts of {layers} layers"
        yield Finding("ok", "kernel", text, {"variant": variant, "kernel": chosen, "expert_layers": layers})


def _better(kernel: LinearKernel) -> dict[str, str]:
    """Return the kernels that vLLM tries before this one on this device, and why it does not take them."""
    here = current_platform._enum
    registers: list[Sequence[type[LinearKernel]]] = [_POSSIBLE_KERNELS.get(here, [])]
    registers += [_POSSIBLE_INT8_KERNELS.get(here, []), _POSSIBLE_FP8_KERNELS.get(here, [])]
    for candidates in registers:
        if type(kernel) in candidates:
            before = candidates[: candidates.index(type(kernel))]
            reasons = {candidate.__name__: _why_not(candidate, kernel) for candidate in before}
            return {name: why for name, why in reasons.items() if why}
    return {}


def _why_not(candidate: type[LinearKernel], kernel: LinearKernel) -> str:
    """Return why vLLM does not take a kernel; empty if it could, but the user or policy asked for another."""
    name = candidate.__name__
    if name in REPLACED:
        return "FlexQuant replaces it on this CPU, see flexquant/serving/kernels/cpu_kernels.py"
    if not issubclass(candidate, MPLinearKernel):
        assert not isinstance(kernel, MPLinearKernel)
        said = is_supported_and_can_implement_kernel(candidate, kernel.config, None)[1]
        return said.strip(" .").removeprefix(f"{name} ")
    capability = current_platform.get_device_capability()
    if capability is not None and candidate.get_min_capability() > capability.to_int():
        return f"it needs compute capability {candidate.get_min_capability() / 10}"
    return (candidate.can_implement(kernel.config)[1] or "").strip(" .")


def examine_memory(
    vllm_config: VllmConfig, variants: Mapping[str, nn.Module], routes: RouteTable
) -> Iterator[Finding]:
    """Yield how much memory the weights take on one rank, and how much is left for the KV cache.

    Weights count as stored; an lm_head that a CPU's kernels pack counts twice, and PyTorch's INT4 kernel has
    a zero point beside each scale. A variant that computes weights in each pass takes memory to write them
    to. Memory of activations and CUDA graphs is unknown before a start.
    """
    memory = memory_of_weights(variants)
    sizes, by_layers = memory.nbytes(), memory.nbytes_by_range()
    weights = sum(sizes.values())
    text = f"{format_bytes(weights)} a rank: {describe_bytes(by_layers)}"
    for name, derivation in routes.derived.items():
        if {name, derivation.source} <= variants.keys() and not derivation.is_one_copy:
            text += f"; {name} is a second copy of {derivation.source}'s INT4 weights"
    yield Finding("ok", "weights", text, {"bytes": sizes, "bytes_by_layers": by_layers})
    if remark := head_remark(*_bytes_of_a_step(variants, memory, routes)):
        yield Finding("note", "lm_head", remark)
    longest = vllm_config.model_config.max_model_len
    specs = [layer.get_kv_cache_spec(vllm_config) for layer in attention_layers(vllm_config)]
    per_token = sum(spec.max_memory_usage_bytes(vllm_config) for spec in specs if spec) // longest
    asked, (free, _) = asked_for_cache(vllm_config, weights), free_and_total_bytes()
    tokens = max(0, asked) // per_token
    room = f"{tokens} tokens ({per_token} bytes each), {tokens / longest:.1f} requests of {longest}"
    there = f"{format_bytes(free)} are free for it and the weights"
    text = f"{format_bytes(asked)} for the KV cache are {room}; {there}"
    details = {"kv_cache_bytes": asked, "bytes_per_token": per_token, "tokens": tokens, "free_bytes": free}
    if tokens >= longest and weights + asked <= free:
        yield Finding("ok", "memory", text, details)
        return
    advice = ": too little; free memory, lower --max-model-len, or raise --gpu-memory-utilization "
    advice += "(VLLM_CPU_KVCACHE_SPACE on a CPU), or take a policy of fewer variants"
    yield Finding("problem", "memory", text + advice, details)


def _bytes_of_a_step(
    variants: Mapping[str, nn.Module], memory: WeightMemory, routes: RouteTable
) -> tuple[int, int]:
    """Return the bytes that decode one sequence: of a 16-bit lm_head on this rank, or 0, and of layers."""
    decode, sizes = routes.lookup("decode", 1).layers, memory.nbytes_by_layer()
    of_layers = 0
    for number, name in enumerate(decode):
        stored = name if routes.has_weights(name) else routes.source(name)
        read = {stored, routes.nested.get(stored, stored), SHARED}
        of_layers += sum(sizes.get(of, {}).get(number, 0) for of in read)
    model = variants[decode[-1]]
    heads = [head for head in multiplied(model) if isinstance(head.quant_method, IN_16_BIT)]
    if not heads or expert_layers(model) or not get_pp_group().is_last_rank:
        return 0, of_layers
    return heads[0].get_parameter("weight").nbytes, of_layers


def memory_of_weights(variants: Mapping[str, nn.Module]) -> WeightMemory:
    """Return what the weights of models that have none yet will take, as :func:`examine_memory` says."""
    for module in [module for model in variants.values() for module in model.modules()]:
        if isinstance(kernel := kernel_of_layer(module), TorchCPUInt4LinearKernel):
            # That kernel keeps zero points beside the scales.
            zeros = torch.empty_like(getattr(module, kernel.w_s_name), device="meta")
            module.register_parameter("flexquant_zero_points", nn.Parameter(zeros, requires_grad=False))
        if isinstance(method := getattr(module, "quant_method", None), Int8HeadMethod):
            method.exchange_weights(module)
    return WeightMemory(variants, [m for model in variants.values() for m in to_be_packed(model)])


def attention_layers(vllm_config: VllmConfig) -> list[AttentionLayerBase]:
    """Return the attention layers of the built model; experts are registered beside them."""
    registered = vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in registered if isinstance(layer, AttentionLayerBase)]


def cache_sizes(vllm_config: VllmConfig) -> tuple[int, int]:
    """Return the bytes that a token, and the states of a request, take in the KV cache on one rank."""
    per_token = states = 0
    for layer in attention_layers(vllm_config):
        if (spec := layer.get_kv_cache_spec(vllm_config)) is None:
            continue
        if isinstance(layer, MambaBase):
            states += spec.page_size_bytes
        else:
            per_token += spec.page_size_bytes // spec.block_size
    return per_token, states


def asked_for_cache(vllm_config: VllmConfig, weights: int) -> int:
    """Return the KV cache's bytes: the requested ones, or what the weights leave of vLLM's memory share."""
    cache = vllm_config.cache_config
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes
    return int(cache.gpu_memory_utilization * free_and_total_bytes()[1]) - weights


def free_and_total_bytes() -> tuple[int, int]:
    """Return the bytes of the GPU's memory, or of the machine's without a GPU."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()
    memory = psutil.virtual_memory()
    return memory.available, memory.total
