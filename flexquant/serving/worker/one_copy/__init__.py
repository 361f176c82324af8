# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Serve 8 bit without a copy of the weights: in each pass each linear computes them from INT4 or 16 bit.

A *derived* variant has the 8-bit weights nearest to those of its source, a variant in INT4 or in 16 bit: one
copy. A *nested* variant stores, for each of its own INT8 weights, a difference of 4 bits from what the INT4
weights predict.

1. *Build*: a source in INT4 gets kernels whose layout of weights ``cpu.layout_of`` or ``gpu.layout_of``
   knows. A derived variant is a view of the source, with a view of each linear in the source's precision that
   has another method (``methods``). A nested one is a model of its own, whose linears have parameters for
   what is stored.
2. *Load*: then :func:`make_ready` gives each linear of a view one scale a channel, and packs differences as
   the source's kernel packs weights.
3. *Pass*: the method reads the weights where the source's kernel keeps them, writes 8-bit weights into memory
   that all layers share, and multiplies in 8 bit. Blackwell has no INT8: one copy is in FP8 there. From 16
   bit a CPU computes the weights at the start instead, and keeps them.

Layers in other precisions, and experts, compute as in the source.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from compressed_tensors.utils import patch_attr
from torch import nn

from flexquant.errors import FlexQuantError
from flexquant.serving.derivable import check_one_copy_device
from flexquant.serving.kernels.layers import expert_layers_by_path, kernel_of_layer
from flexquant.serving.vllm_api import LinearBase, MPLinearKernel, QuantizationConfig, QuantizeMethodBase
from flexquant.serving.worker.one_copy.methods import (
    Int4Method,
    NestedMethod,
    OneCopyMethod,
    is_rounded,
    product_of,
    rounding_method,
)
from flexquant.serving.worker.plan_views import shallow_copy, stack_of_layers, stack_path, with_module


def one_copy_of(source: nn.Module, name: str, precision: str, is_in_16_bit: bool = False) -> nn.Module:
    """Return ``name``, a view of ``source``, before weights load; ``precision``: int8 or fp8.

    Raises :class:`FlexQuantError` without a linear to compute, or for INT4 weights in an unknown layout.
    """
    check_one_copy_device(f"the policy derives '{name}'", precision)
    variant = source
    for path, layer in _linears_in_16_bit(source) if is_in_16_bit else _int4_linears(source):
        view = shallow_copy(layer)
        method = rounding_method(layer, precision) if is_in_16_bit else Int4Method()
        if isinstance(method, Int4Method):
            method.read(layer, f"{name}, {path}", precision)
        vars(view)["quant_method"] = method
        variant = with_module(variant, f"{stack_path(source)}.{path}", view)
    if variant is source:
        kind, other = ("linear", "bf16") if is_in_16_bit else ("INT4 linear", "w4a16")
        problem = f"variant '{name}' has no {kind} to compute 8-bit weights from"
        raise FlexQuantError(f"{problem}; choose a policy without it, such as {other}")
    return variant


@contextmanager
def nesting_in(source: nn.Module | None, quant_config: QuantizationConfig | None) -> Iterator[None]:
    """Build a variant's linears as nested in those that ``source`` has in INT4; None: nothing is nested."""
    if source is None:
        yield
        return
    assert quant_config is not None, "every variant is quantised"
    int4 = {layer.prefix: layer for _, layer in _int4_linears(source)}
    method_of = quant_config.get_quant_method

    def get_quant_method(layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        method, scheme = method_of(layer, prefix), getattr(layer, "scheme", None)
        if prefix not in int4:
            return method
        return NestedMethod(int4[prefix], symmetric=getattr(scheme, "input_symmetric", True))

    with patch_attr(quant_config, "get_quant_method", get_quant_method):
        yield


def read_sources(variant: nn.Module, name: str) -> None:
    """Choose how nested linears read INT4, after the choice of kernels; raise FlexQuantError if none can."""
    for layer, method in _computing(variant):
        if isinstance(method, NestedMethod):
            method.read(method.source, f"{name}, {layer.prefix}")


def readable_kinds(kernel: MPLinearKernel, kinds: Iterable[type[Any]]) -> list[type[Any]]:
    """Return those of ``kinds`` of INT4 kernels whose layout of ``kernel``'s layer is known."""
    return [kind for kind in kinds if product_of(kernel, kind) is not None]


def make_ready(models: Iterable[nn.Module]) -> None:
    """Make the variants among ``models`` that compute their weights ready, once all weights are loaded."""
    for layer, method in chain.from_iterable(map(_computing, models)):
        method.make_ready(layer)


def computed_bytes(model: nn.Module) -> tuple[int, int]:
    """Return the bytes that a variant writes its weights to in each pass, and those that it keeps to do so.

    The first are for its largest linear; all such variants share them. Both are 0 if weights are stored.
    """
    sizes = [method.nbytes(layer) for layer, method in _computing(model)]
    return max((written for written, _ in sizes), default=0), sum(own for _, own in sizes)


def is_view(model: nn.Module) -> bool:
    """Whether a variant has no parameters of its own: those of its linears are all computed."""
    methods = [method for _, method in _computing(model)]
    return bool(methods) and not any(isinstance(method, NestedMethod) for method in methods)


def _computing(model: nn.Module) -> Iterator[tuple[LinearBase, OneCopyMethod]]:
    """Yield the linears of a model that compute their weights in each pass, with their methods."""
    for module in model.modules():
        if isinstance(module, LinearBase) and isinstance(module.quant_method, OneCopyMethod):
            yield module, module.quant_method


def _int4_linears(model: nn.Module) -> Iterator[tuple[str, LinearBase]]:
    """Yield the linears with INT4 weights below a model's decoder layers, with their paths."""
    for path, layer in stack_of_layers(model).named_modules():
        kernel = kernel_of_layer(layer)
        if not (isinstance(layer, LinearBase) and isinstance(kernel, MPLinearKernel)):
            continue
        if kernel.config.weight_type.size_bits == 4:
            yield path, layer


def _linears_in_16_bit(model: nn.Module) -> Iterator[tuple[str, LinearBase]]:
    """Yield the linears in 16 bit below a model's decoder layers, with their paths, but no routers."""
    stack = stack_of_layers(model)
    with_experts = {path.rpartition(".")[0] for path in expert_layers_by_path(stack)}
    for path, layer in stack.named_modules():
        is_router = path.rpartition(".")[0] in with_experts
        if isinstance(layer, LinearBase) and not is_router and is_rounded(layer):
            yield path, layer
