# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Find a model's linear and expert layers, their sizes and kernels, and exchange a linear's kernel."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from flexquant.serving.vllm_api import (
    LinearBase,
    MoERunner,
    MPLinearKernel,
    ScaledMMLinearKernel,
    UnquantizedFusedMoEMethod,
    VocabParallelEmbedding,
)

LinearKernel = MPLinearKernel | ScaledMMLinearKernel
"""A kernel of vLLM's for weights that are packed, or for weights and activations in 8 bit."""


def kernel_of_layer(layer: object) -> LinearKernel | None:
    """Return the kernel of a quantised layer; None in 16 bit, and for a scheme without a kernel object."""
    return next((getattr(holder, name) for holder, name in _kernels(layer)), None)


def exchange_kernel(layer: object, kind: Callable[..., LinearKernel], **changes: object) -> None:
    """Exchange the kernel of a quantised layer for one of another kind, with ``changes`` to its config."""
    holder, name = next(_kernels(layer))
    kernel = getattr(holder, name)
    if type(kernel) is kind and not changes:
        return
    config = dataclasses.replace(kernel.config, **changes)
    if isinstance(kernel, MPLinearKernel):
        setattr(holder, name, kind(config, kernel.w_q_name, kernel.w_s_name, kernel.w_zp_name))
    else:
        setattr(holder, name, kind(config, kernel.layer_param_names))


def _kernels(layer: object) -> Iterator[tuple[object, str]]:
    """Yield the holder of a layer's kernel (its scheme or its method) and the name of the attribute."""
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


def linears(model: nn.Module) -> dict[str, Any]:
    """Return module name -> linear layer of a model, in order, with lm_heads that have a quantised kernel."""

    def is_linear(module: nn.Module) -> bool:
        is_embedding = isinstance(module, VocabParallelEmbedding)
        return isinstance(module, LinearBase) or (is_embedding and kernel_of_layer(module) is not None)

    return {path: module for path, module in model.named_modules() if is_linear(module)}


def kernel_classes(model: nn.Module) -> dict[str, list[str]]:
    """Return name of a linear layer -> name of its kernel, and the classes of its method and its kernel."""
    found = {}
    for path, layer in linears(model).items():
        classes = (type(layer.quant_method), type(kernel_of_layer(layer)))
        found[path] = [kernel_name(layer), *(f"{of.__module__}.{of.__qualname__}" for of in classes)]
    return found


def linear_sizes(layer: LinearBase | VocabParallelEmbedding) -> tuple[int, int]:
    """Return a linear's inputs and outputs on this rank; those whole on all ranks may lack partitions."""
    inputs = getattr(layer, "input_size_per_partition", layer.input_size)
    return inputs, getattr(layer, "output_size_per_partition", layer.output_size)


def kernel_names(model: nn.Module) -> list[str]:
    """Return the names of all kernels of a model's linear and expert layers, in alphabetical order."""
    names = {*map(kernel_name, linears(model).values())}
    return sorted(names | {*map(experts_kernel_name, expert_layers(model))})


def expert_layers(model: nn.Module) -> list[MoERunner]:
    """Return the mixture-of-experts layers of a model, in order."""
    return list(expert_layers_by_path(model).values())


def expert_layers_by_path(model: nn.Module) -> dict[str, MoERunner]:
    """Return module name -> mixture-of-experts layer of a model, in order."""
    return {path: module for path, module in model.named_modules() if isinstance(module, MoERunner)}


def experts_kernel_name(layer: MoERunner) -> str:
    """Return the name of the kernel that runs an expert layer's experts."""
    method = layer.routed_experts.quant_method
    kernel = getattr(method, "experts_cls", None)
    name = kernel.__name__ if kernel else type(method).__name__
    return f"{name} (16 bit)" if isinstance(method, UnquantizedFusedMoEMethod) else name


def expert_weights(layer: MoERunner) -> int:
    """Return how many weights the experts of a layer have on this rank, in any precision."""
    config = layer.routed_experts.moe_config
    one = config.hidden_dim * config.intermediate_size_per_partition
    return config.num_local_experts * one * (3 if config.is_act_and_mul else 2)
