# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Derive W4A8: multiply a W4A16 variant's INT4 weights with activations quantised to 8 bit per token.

On a GPU vLLM's kernels do this: CUTLASS's on Hopper, Humming's and Marlin's. Stock vLLM enables Marlin's for
a whole process (``VLLM_MARLIN_INPUT_DTYPE``), and only for layers that Marlin runs anyway, which it does not
on Hopper (Machete runs them). Here a single variant uses them: each of its INT4 layers exchanges its kernel
before the weights are loaded. The layer reads the same tensors from the checkpoint, but the kernel needs
another layout, which costs half a byte a weight.
"""

import dataclasses
from typing import Any

import torch
from torch import nn
from vllm.platforms import current_platform

from flexquant.errors import FlexQuantError
from flexquant.serving.derivable import ONE_SCALE, check_w4a8_device
from flexquant.serving.kernels.cpu_kernels import TorchCPUW4A8LinearKernel
from flexquant.serving.kernels.gpu_kernels import W4A8_KERNELS
from flexquant.serving.kernels.layers import exchange_kernel
from flexquant.serving.vllm_api import (
    CompressedTensorsWNA16,
    MPLinearKernel,
    VocabParallelEmbedding,
    get__quant_fp8_method,
)
from flexquant.serving.worker.layers_by_name import is_state_layer_or_its_convolution

DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def int4_scheme(layer: nn.Module) -> CompressedTensorsWNA16 | None:
    """Return the scheme of a linear with packed weights and 16-bit activations; None for another module."""
    scheme = None if isinstance(layer, VocabParallelEmbedding) else getattr(layer, "scheme", None)
    return scheme if isinstance(scheme, CompressedTensorsWNA16) else None


def use_8bit_activations(model: nn.Module, activations: str) -> None:
    """Have INT4 layers below ``model``, not loaded yet, quantise inputs to int8 or fp8 per token.

    Raises :class:`FlexQuantError` where this device has no kernel, or packed weights do not suit it.
    """
    kernels = find_kernels(activations)
    if activations == "fp8":
        get__quant_fp8_method()  # built now, while vLLM's config is at hand
    for name, layer in model.named_modules():
        if (scheme := int4_scheme(layer)) is None:
            continue
        if scheme.kernel is None:
            problem = "vLLM runs it without a kernel in its batch-invariant mode"
            advice = "unset VLLM_BATCH_INVARIANT, or take such a variant's rules out of the policy"
            raise FlexQuantError(f"layer '{name}' cannot have {activations} activations: {problem}; {advice}")
        changes: dict[str, Any] = {"act_type": DTYPES[activations], "out_type": scheme.kernel.config.act_type}
        config = dataclasses.replace(scheme.kernel.config, **changes)
        problems = {kernel: kernel.can_implement(config)[1] for kernel in kernels}
        # group_problem has refused everything else before; a layer's width is known only here.
        one_group = activations == "int8" and config.group_size in (-1, config.partition_weight_shape[0])
        able = [] if one_group else [kernel for kernel, problem in problems.items() if problem is None]
        if not able:
            problem = f"its {ONE_SCALE}" if one_group else problems[kernels[-1]]
            problem = f"layer '{name}' cannot have {activations} activations: {problem}"
            raise FlexQuantError(f"{problem}; take such a variant's rules out of the policy")
        exchange_kernel(layer, able[0], **changes)


def modules_as_in_source(variant: nn.Module) -> tuple[str, ...]:
    """Return the modules that a derived variant shares with its source: all without INT4 linear layers.

    Whole expert layers are shared. Of a layer that keeps a state, the norm and linears in 16 bit are.
    """
    return tuple(
        name
        for name, module in variant.named_modules()
        if (module._parameters or module._buffers)
        and not any(map(int4_scheme, module.modules()))
        and not is_state_layer_or_its_convolution(module)
    )


def find_kernels(activations: str) -> tuple[type[MPLinearKernel], ...]:
    """Return kernel classes for INT4 weights and 8-bit activations, the last one for most layers.

    On a CPU it is a stand-in, which ``kernels.choice`` exchanges. Raises :class:`FlexQuantError` without one.
    """
    check_w4a8_device(activations)
    return W4A8_KERNELS if current_platform.is_cuda() else (TorchCPUW4A8LinearKernel,)
