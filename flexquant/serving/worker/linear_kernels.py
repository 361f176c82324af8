# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Name the kernels of a model's layers, and exchange a linear layer's kernel for another kind."""

from __future__ import annotations

from typing import Any

from torch import nn

from flexquant.serving.vllm_api import LinearBase, MPLinearKernel
from flexquant.serving.worker.expert_layers import expert_layers, experts_kernel_name


def kernel_of_layer(layer: Any) -> Any:
    """Return the kernel of a quantised layer; None in 16 bit, and for a scheme without a kernel object."""
    scheme = getattr(layer, "scheme", None)
    if scheme is None:
        return None
    return next((value for value in vars(scheme).values() if hasattr(type(value), "can_implement")), None)


def kernel_name(layer: Any) -> str:
    """Return the name of a linear layer's kernel, or of vLLM's method if it has none."""
    kernel = kernel_of_layer(layer)
    return type(kernel).__name__ if kernel else f"{type(layer.quant_method).__name__} (16 bit)"


def linear_sizes(layer: Any) -> tuple[int, int]:
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


def remake(kernel: Any, kind: Any) -> Any:
    """Return a kernel of another kind for the same layer."""
    if isinstance(kernel, MPLinearKernel):
        return kind(kernel.config, kernel.w_q_name, kernel.w_s_name, kernel.w_zp_name)
    return kind(kernel.config, kernel.layer_param_names)
