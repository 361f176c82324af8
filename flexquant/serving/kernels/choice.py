# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Choose, for each linear layer of a variant, the fastest of the available correct kernels.

vLLM uses one order of kernels for a process, whatever the number of tokens, and its first is not always the
fastest: on a server CPU the fastest of three W4A16 kernels for one token is the slowest for a prompt, and on
Hopper Humming decodes in 0.7 of the time of Machete, which vLLM takes. So each variant's layers are timed
with the sizes of its decode passes, or of prompts if it has none (:mod:`flexquant.serving.kernels.trial`). If
only one kernel is available, nothing is timed. A kernel that the user names is taken instead.
"""

import importlib
import os
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.platforms import current_platform

from flexquant.documents.results import digest_of
from flexquant.errors import FlexQuantError, said_by
from flexquant.policy.routes import RouteTable
from flexquant.policy.schema import PHASES
from flexquant.serving.kernels.cpu_kernels import (
    REPLACED,
    AMXW4A8LinearKernel,
    CPUW4A16LinearKernel,
    ZentorchW4A8LinearKernel,
    ZentorchW4A16LinearKernel,
)
from flexquant.serving.kernels.cpu_weight_only import (
    CPUW8A16LinearKernel,
    FlexQuantCPUInt4LinearKernel,
    TorchCPUInt4LinearKernel,
)
from flexquant.serving.kernels.gpu_kernels import W4A8_KERNELS
from flexquant.serving.kernels.layers import LinearKernel, exchange_kernel, kernel_of_layer
from flexquant.serving.kernels.trial import LayerTrial, find_fastest
from flexquant.serving.vllm_api import (
    CPUInt8ScaledMMLinearKernel,
    HummingLinearKernel,
    LinearBase,
    MacheteLinearKernel,
    MarlinLinearKernel,
    MPLinearKernel,
    VocabParallelEmbedding,
    get_current_vllm_config_or_none,
    scalar_types,
)
from flexquant.serving.worker.one_copy import readable_kinds

logger = init_logger("vllm.flexquant.kernels")

ZENTORCH_INT8 = "ZentorchInt8ScaledMMLinearKernel"

DECODE_SIZES = (1, 2, 4, 8, 16, 32, 64)
OTHER_SIZES = (64, 256)
"""Numbers of tokens with which kernels are timed for prefill and mixed passes."""
EIGHT_BIT = (torch.int8, torch.float8_e4m3fn)
FEWEST_WEIGHTS = 1 << 18
"""Least number of weights in a layer whose kernels are timed; smaller layers take vLLM's first kernel."""


def sizes_by_variant(routes: RouteTable) -> dict[str, tuple[int, ...]]:
    """Return by variant the tokens with which its kernels are timed: of decode passes, if it has any."""
    in_decode: dict[str, set[int]] = {}
    in_others: dict[str, set[int]] = {}
    for phase in PHASES:
        tried, found = (DECODE_SIZES, in_decode) if phase == "decode" else (OTHER_SIZES, in_others)
        for first, last, plan in routes.intervals(phase):
            sizes = {size for size in tried if first <= size <= last} or {min(last, max(first, tried[-1]))}
            for variant in plan.variants:
                found.setdefault(variant, set()).update(sizes)
    return {variant: tuple(sorted(sizes)) for variant, sizes in (in_others | in_decode).items()}


def choose_kernels(
    models: Mapping[str, nn.Module],
    sizes: Mapping[str, Sequence[int]],
    read_again: Collection[str] = (),
    named: Mapping[str, str] | None = None,
) -> None:
    """Replace the kernels of the INT4 and INT8 layers below ``models``, whose weights are not loaded yet.

    ``sizes`` maps the models' names to the numbers of tokens with which to time kernels. The INT4 kernels of
    models in ``read_again`` keep their weights in a layout that is known. ``named`` maps models' names to the
    kernels that the user wants, each by the beginning of its class name in any case, as ``humming``; a layer
    that such a kernel cannot run gets another one. Raises :class:`FlexQuantError` for a name of no kernel.
    """
    if problem := zentorch_problem():
        logger.warning(problem)
    to_try: dict[str, tuple[LayerTrial, list[Any]]] = {}
    kinds_by_name: dict[str, type[LinearKernel]] = {}
    for name, model in models.items():
        kernels = {layer: kernel for layer in model.modules() if (kernel := kernel_of_layer(layer))}
        kinds_of: dict[Any, list[type[LinearKernel]]] = {of: _kinds_for(of, k) for of, k in kernels.items()}
        if wanted := (named or {}).get(name):
            kinds_of = _only(kinds_of, wanted, name)
        if name in read_again:
            kinds_of = {layer: _readable(layer, kinds) for layer, kinds in kinds_of.items()}
        for layer, kinds in kinds_of.items():
            if len(kinds) > 1 and _is_worth_a_trial(layer):
                by_name = {f"{kind.__module__}:{kind.__name__}": kind for kind in kinds}
                kinds_by_name |= by_name
                is_head = isinstance(layer, VocabParallelEmbedding)  # which computes one row a sequence
                tokens = DECODE_SIZES if is_head else sizes.get(name, DECODE_SIZES)
                request = _request(layer, tokens, list(by_name))
                to_try.setdefault(digest_of(request), (request, []))[1].append(layer)
            elif kinds:
                exchange_kernel(layer, kinds[0])
    chosen = find_fastest([request for request, _ in to_try.values()])
    for (_, layers), kind_name in zip(to_try.values(), chosen, strict=True):
        for layer in layers:
            exchange_kernel(layer, kinds_by_name[kind_name])


def _kinds_for(layer: Any, kernel: LinearKernel) -> list[type[LinearKernel]]:
    """Return the kernels among which a layer's is chosen."""
    kinds = possible_kernels(kernel)
    if getattr(layer, "bias", None) is not None and getattr(layer, "input_is_parallel", False):
        # vLLM 0.26's adds the bias on every rank. Delete this when the oldest supported one does not.
        kinds = [kind for kind in kinds if not issubclass(kind, HummingLinearKernel)]
    return kinds


def _readable(layer: Any, kinds: list[type[LinearKernel]]) -> list[type[LinearKernel]]:
    """Return the kernels among ``kinds`` that keep a linear's INT4 weights in a known layout."""
    kernel = kernel_of_layer(layer)
    if not isinstance(kernel, MPLinearKernel) or kernel.config.weight_type.size_bits != 4:
        return kinds
    return readable_kinds(kernel, kinds) if isinstance(layer, LinearBase) else kinds


def _only(
    kinds_of: Mapping[Any, list[type[LinearKernel]]], wanted: str, variant: str
) -> dict[Any, list[type[LinearKernel]]]:
    """Return the kernels whose name begins with ``wanted``, and for a layer that has none of them, all."""
    all_kinds = {kind.__name__: kind for kinds in kinds_of.values() for kind in kinds}
    those = [kind for name, kind in all_kinds.items() if name.lower().startswith(wanted.lower())]
    if not those:
        key = f"additional-config key 'flexquant.kernels' is '{wanted}' for '{variant}'"
        runs = f"whose layers run on {', '.join(sorted(all_kinds)) or 'one kernel alone'}"
        raise FlexQuantError(f"{key}, {runs}; give the beginning of one of these")
    return {layer: [kind for kind in kinds if kind in those] or kinds for layer, kinds in kinds_of.items()}


def _request(layer: Any, sizes: Sequence[int], kinds: list[str]) -> LayerTrial:
    config = getattr(kernel_of_layer(layer), "config", None)
    act_type = getattr(config, "act_type", None)
    return {
        "inputs": layer.input_size_per_partition,
        "outputs": layer.output_size_per_partition,
        "dtype": str(layer.params_dtype).removeprefix("torch."),
        "group_size": getattr(config, "group_size", None),
        "bits": getattr(getattr(config, "weight_type", None), "size_bits", 8),
        "zero_points": getattr(config, "zero_points", False),
        "activations": str(act_type).removeprefix("torch.") if act_type in EIGHT_BIT else None,
        "sizes": list(sizes),
        "kernels": kinds,
    }


def _is_worth_a_trial(layer: Any) -> bool:
    """Whether a layer has many weights, in INT4 or INT8 by channel, whose activations are not static."""
    kernel = kernel_of_layer(layer)
    if kernel is None or layer.input_size_per_partition * layer.output_size_per_partition < FEWEST_WEIGHTS:
        return False
    if isinstance(kernel, MPLinearKernel):
        return kernel.config.weight_type in (scalar_types.uint4b8, scalar_types.uint4, scalar_types.uint8b128)
    config = kernel.config
    return config.is_channelwise and config.input_symmetric and not config.is_static_input_scheme


def possible_kernels(kernel: LinearKernel) -> list[type[LinearKernel]]:
    """Return the kernels that can replace ``kernel`` on this device in the same precision, vLLM's first.

    It is empty for W8A8 on GPUs, for which vLLM has one kernel, and for W4A8 where only the stand-in runs.
    """
    kinds = _for_cpu(kernel) if current_platform.is_cpu() else _for_gpu(kernel)
    disabled = os.environ.get("VLLM_DISABLED_KERNELS", "").split(",")
    enabled = (k for k in kinds if not {k.__name__, getattr(k, "of", k.__name__)} & {*disabled})
    return [kind for kind in enabled if kind.can_implement(kernel.config)[0]]


def _for_gpu(kernel: LinearKernel) -> list[type[LinearKernel]]:
    """Return vLLM's kernels for quantised weights alone on this GPU, the layer's own first."""
    capability = current_platform.get_device_capability()
    if not isinstance(kernel, MPLinearKernel) or not capability:
        return []
    vllm_config = get_current_vllm_config_or_none()
    is_named = vllm_config is not None and vllm_config.kernel_config.linear_backend != "auto"
    if is_named or getattr(kernel.config, "has_g_idx", False):
        return [type(kernel)]
    if kernel.config.act_type in EIGHT_BIT:
        return list(W4A8_KERNELS)
    of_vllm: list[type[MPLinearKernel]] = [MacheteLinearKernel, MarlinLinearKernel, HummingLinearKernel]
    kinds = dict.fromkeys([type(kernel), *of_vllm])
    return [kind for kind in kinds if kind.get_min_capability() <= capability.to_int()]


def _for_cpu(kernel: LinearKernel) -> list[type[LinearKernel]]:
    kinds: list[type[LinearKernel]] = []
    if isinstance(kernel, MPLinearKernel):
        is_w4a8 = kernel.config.act_type == torch.int8
        if has_zentorch():
            kinds.append(ZentorchW4A8LinearKernel if is_w4a8 else ZentorchW4A16LinearKernel)
        if hasattr(torch.ops._C, "cpu_gemm_wna16"):
            # PyTorch's `_dyn_quant_matmul_4bit` is left out: on x86 it is 30 times slower than these.
            kinds.append(AMXW4A8LinearKernel if is_w4a8 else CPUW4A16LinearKernel)
        if not is_w4a8:
            kinds += [FlexQuantCPUInt4LinearKernel, TorchCPUInt4LinearKernel, CPUW8A16LinearKernel]
    elif isinstance(kernel, CPUInt8ScaledMMLinearKernel) or type(kernel).__name__ == ZENTORCH_INT8:
        kinds = [REPLACED.get("CPUInt8ScaledMMLinearKernel", CPUInt8ScaledMMLinearKernel)]
        if has_zentorch():
            from flexquant.serving.vllm_api import ZentorchInt8ScaledMMLinearKernel

            kinds.insert(0, ZentorchInt8ScaledMMLinearKernel)
    return kinds


def zentorch_problem() -> str | None:
    """Return why vLLM does not use an installed zentorch; None if it does, or if none is installed."""
    try:
        installed = version("zentorch")
    except PackageNotFoundError:
        return None
    if has_zentorch():
        return None
    try:
        importlib.import_module("zentorch")
    except (ImportError, OSError) as e:
        reason = f"it does not load with torch {torch.__version__} ({said_by(e)})"
    else:
        reason = "it is for AMD CPUs with AVX512"
    what = f"zentorch {installed} is installed and not used: {reason}"
    return f"{what}; FlexQuant's extra 'zen' names the release that fits vLLM's torch"


def has_zentorch() -> bool:
    """Whether vLLM has AMD's kernels: on Zen 4 and later, with a zentorch that fits the installed torch."""
    return getattr(current_platform, "is_zen_cpu", bool)()
