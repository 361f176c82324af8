# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Derive W8A8 without a second copy of the weights: each linear computes INT8 weights from INT4 in each pass.

The variant is a view of its source, the W4A16 variant: it has the source's modules, but for each INT4 linear
a view of that linear with another method. The method reads the weights where the source's kernel keeps them,
in that kernel's layout, and writes INT8 weights with one scale a channel into memory that all layers share.
An INT8 product with 8-bit activations follows; on Blackwell, which has none, all this is FP8. Layers in other
precisions, and experts, compute as in the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Protocol

import torch
from torch import nn
from vllm.platforms import current_platform

from flexquant.errors import FlexQuantError
from flexquant.serving.derivations import check_one_copy_device
from flexquant.serving.vllm_api import (
    LinearBase,
    MarlinLinearKernel,
    MPLinearKernel,
    QuantizeMethodBase,
)
from flexquant.serving.worker.linear_kernels import kernel_of_layer, linear_sizes, remake, set_kernel
from flexquant.serving.worker.plan_views import shallow_copy, stack_of_layers, with_module

SCALE_BYTES = 4
MARLIN_TILES = ((64, 128), (128, 64))
"""Outputs and inputs of which Marlin takes multiples; it pads weights with others."""


class Int8Product(Protocol):
    """Multiplies in 8 bit by the weights that the INT4 kernel of one device keeps."""

    precision: str
    """For people: INT8, or FP8."""

    def prepare(self, layer: nn.Module) -> dict[str, torch.Tensor]:
        """Return the buffers that the layer's view needs, once its weights are packed."""

    def multiply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return [tokens, outputs] for ``x`` [tokens, inputs], in its dtype; ``bias`` is the layer's."""


class OneCopyMethod(QuantizeMethodBase):
    """Computes the outputs of a linear with ``product``; ``kernel_name`` is for people."""

    def __init__(self, product: Int8Product, kernel_name: str) -> None:
        self._product = product
        self.kernel_name = kernel_name

    def create_weights(self, layer: nn.Module, *weight_args: object, **extra_weight_attrs: object) -> None:
        raise RuntimeError("the source creates the weights; this is a FlexQuant bug")

    def find_scales(self, layer: LinearBase) -> None:
        """Make ``layer``, a view, ready once the source's kernel has packed its weights."""
        layer._buffers = {**layer._buffers, **self._product.prepare(layer)}

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return [..., outputs] for ``x`` [..., inputs], in its dtype."""
        out = self._product.multiply(layer, x.reshape(-1, x.shape[-1]), bias)
        return out.reshape(*x.shape[:-1], out.shape[-1])


def one_copy_of(source: nn.Module, name: str) -> nn.Module:
    """Return the variant ``name``, a view of ``source``, whose weights are not loaded yet.

    Raises :class:`FlexQuantError` if no linear of a decoder layer has INT4 weights in a known layout.
    """
    check_one_copy_device(f"the policy derives '{name}'")
    views: dict[str, nn.Module] = {}
    for path, layer in stack_of_layers(source).named_modules():
        if isinstance(layer, LinearBase) and (method := _method(layer, f"{name}, {path}")) is not None:
            views[path] = shallow_copy(layer)
            vars(views[path])["quant_method"] = method
    if not views:
        raise FlexQuantError(
            f"variant '{name}' has no INT4 linear to compute INT8 weights from; choose a policy without it, "
            "such as w4a16"
        )
    layers = stack_of_layers(source)
    path_of_layers = next(path for path, module in source.named_modules() if module is layers)
    for path, view in views.items():
        source = with_module(source, f"{path_of_layers}.{path}", view)
    return source


def find_scales(models: Iterable[nn.Module]) -> None:
    """Make the variants among ``models`` that compute their weights ready, once all weights are loaded."""
    for module in chain.from_iterable(map(_computing, models)):
        assert isinstance(module.quant_method, OneCopyMethod)
        module.quant_method.find_scales(module)


def computed_bytes(model: nn.Module) -> int:
    """Return the bytes that a variant takes beside its source: 0 for one that has weights of its own.

    They are the INT8 weights of its largest linear, and for each linear one float32 scale an output channel.
    """
    sizes = [linear_sizes(layer) for layer in _computing(model)]
    return max((i * o for i, o in sizes), default=0) + sum(SCALE_BYTES * o for _, o in sizes)


def _computing(model: nn.Module) -> Iterator[LinearBase]:
    """Yield the linears of a model that compute their weights in each pass."""
    for module in model.modules():
        if isinstance(module, LinearBase) and isinstance(module.quant_method, OneCopyMethod):
            yield module


def _method(layer: LinearBase, place: str) -> OneCopyMethod | None:
    """Return the method for a linear with INT4 weights; None for another linear."""
    kernel = kernel_of_layer(layer)
    if not isinstance(kernel, MPLinearKernel) or kernel.config.weight_type.size_bits != 4:
        return None
    product = _product(kernel)
    if product is None:
        raise FlexQuantError(
            f"{place}: INT8 weights cannot be computed from those of {type(kernel).__name__}, whose layout "
            f"is not known; set VLLM_DISABLED_KERNELS={type(kernel).__name__}"
        )
    return OneCopyMethod(product, f"{product.precision} from {type(kernel).__name__}")


def _product(kernel: MPLinearKernel) -> Int8Product | None:
    """Return the product of this device for a kernel's weights; None if their layout is not known."""
    if isinstance(kernel, MarlinLinearKernel):
        from flexquant.serving.worker.one_copy_marlin import MarlinProduct

        return MarlinProduct(kernel)
    if not current_platform.is_cpu():
        return None
    from flexquant.serving.cpu.one_copy import CPUInt8Product, layout_of

    layout = layout_of(type(kernel))
    return None if layout is None else CPUInt8Product(kernel, layout)


def use_marlin(source: nn.Module) -> None:
    """On a GPU: have Marlin run the INT4 linears of a source, whose weights are not loaded yet.

    vLLM prefers Machete on Hopper, which packs weights in a layout of its own. Raises :class:`FlexQuantError`
    for a linear that Marlin cannot run, or only with its weights padded.
    """
    for path, layer in stack_of_layers(source).named_modules():
        kernel = kernel_of_layer(layer)
        if not isinstance(kernel, MPLinearKernel) or kernel.config.weight_type.size_bits != 4:
            continue
        inputs, outputs = kernel.config.partition_weight_shape
        possible, problem = MarlinLinearKernel.can_implement(kernel.config)
        if possible and not any(outputs % n == 0 and inputs % k == 0 for n, k in MARLIN_TILES):
            possible, problem = False, f"{inputs} inputs and {outputs} outputs do not fill Marlin's tiles"
        if not possible:
            raise FlexQuantError(
                f"INT8 weights cannot be computed from those of layer '{path}': {problem}; take 'weights: "
                "int8' out of the policy"
            )
        if not isinstance(kernel, MarlinLinearKernel):
            set_kernel(layer, remake(kernel, MarlinLinearKernel))
