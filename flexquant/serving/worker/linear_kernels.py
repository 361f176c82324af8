# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Name the kernels of a model's layers, and exchange a linear layer's kernel for another kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeGuard

import torch
from torch import nn

from flexquant.serving.vllm_api import LinearBase, MPLinearKernel, ScaledMMLinearKernel
from flexquant.serving.worker.expert_layers import expert_layers, experts_kernel_name

LinearKernel = MPLinearKernel | ScaledMMLinearKernel
"""A kernel of vLLM's for weights that are packed, or for weights and activations in 8 bit."""


class QuantisedLayer(Protocol):
    """What vLLM sets on a quantised layer, be it a linear layer or an lm_head."""

    input_size_per_partition: int
    output_size_per_partition: int
    params_dtype: torch.dtype


def is_quantised(layer: nn.Module) -> TypeGuard[QuantisedLayer]:
    """Whether a kernel of vLLM's multiplies a layer by weights that are not in 16 bit."""
    return kernel_of_layer(layer) is not None


def kernel_of_layer(layer: object) -> LinearKernel | None:
    """Return the kernel of a quantised layer; None in 16 bit, and for a scheme without a kernel object."""
    return next((getattr(holder, name) for holder, name in _kernels(layer)), None)


def set_kernel(layer: object, kernel: LinearKernel) -> None:
    """Exchange the kernel of a quantised layer."""
    holder, name = next(_kernels(layer))
    setattr(holder, name, kernel)


def _kernels(layer: object) -> Iterator[tuple[object, str]]:
    """Yield what holds a layer's kernel, and the name of the attribute.

    In compressed-tensors it is the layer's scheme, for AWQ and GPTQ the layer's method.
    """
    for holder in (getattr(layer, "scheme", None), getattr(layer, "quant_method", None)):
        for name, value in getattr(holder, "__dict__", {}).items():
            if hasattr(type(value), "can_implement"):
                yield holder, name


def kernel_name(layer: LinearBase) -> str:
    """Return the name of a linear layer's kernel, or of vLLM's method if it has none."""
    if name := getattr(layer.quant_method, "kernel_name", None):
        return str(name)
    kernel = kernel_of_layer(layer)
    return type(kernel).__name__ if kernel else f"{type(layer.quant_method).__name__} (16 bit)"


def linear_sizes(layer: LinearBase) -> tuple[int, int]:
    """Return the numbers of inputs and outputs that a linear layer has on this rank.

    Layers that are whole on every rank, such as routers, may lack the attributes for a rank's part.
    """
    return (
        getattr(layer, "input_size_per_partition", layer.input_size),
        getattr(layer, "output_size_per_partition", layer.output_size),
    )


def kernel_names(model: nn.Module) -> list[str]:
    """Return the names of all kernels of a model's linear and expert layers, in alphabetical order."""
    linears = {kernel_name(module) for module in model.modules() if isinstance(module, LinearBase)}
    return sorted(linears | {experts_kernel_name(layer) for layer in expert_layers(model)})


def remake(kernel: LinearKernel, kind: Callable[..., LinearKernel]) -> LinearKernel:
    """Return a kernel of another kind for the same layer."""
    if isinstance(kernel, MPLinearKernel):
        return kind(kernel.config, kernel.w_q_name, kernel.w_s_name, kernel.w_zp_name)
    return kind(kernel.config, kernel.layer_param_names)
