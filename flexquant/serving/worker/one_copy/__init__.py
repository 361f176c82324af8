# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Derive W8A8 without a second copy of the weights: each linear computes INT8 weights from INT4 in each pass.

1. *Build*: the source, a W4A16 variant, gets INT4 kernels whose layout of weights is known: those that
   ``cpu.layout_of`` and ``gpu_layouts.layout_of`` know. The variant is a view of the source, with a view of
   each INT4 linear that has another method (:class:`OneCopyMethod`).
2. *Load*: only the source is loaded. Then :func:`find_scales` gives each view one scale a channel.
3. *Pass*: the method reads the weights where the source's kernel keeps them, writes INT8 weights into memory
   that all layers share, and multiplies in INT8; on Blackwell, which has no such product, all this is FP8.

Layers in other precisions, and experts, compute as in the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.platforms import current_platform

from flexquant.errors import FlexQuantError
from flexquant.serving.kernels.layers import kernel_of_layer, linear_sizes
from flexquant.serving.refusals import check_one_copy_device
from flexquant.serving.vllm_api import (
    LinearBase,
    MPLinearKernel,
    QuantizeMethodBase,
)
from flexquant.serving.worker.plan_views import (
    decoder_path,
    shallow_copy,
    stack_of_layers,
    with_module,
)

if TYPE_CHECKING:
    from flexquant.serving.worker.one_copy.cpu import CPUInt8Product
    from flexquant.serving.worker.one_copy.gpu import GPUProduct

    Product = CPUInt8Product | GPUProduct
    """Multiplies in 8 bit by the weights that the INT4 kernel of one device keeps."""

SCALE_BYTES = 4
ADVICE = (
    "Marlin's and Humming's are, for multiples of 128 inputs and 64 outputs: drop --linear-backend and the "
    "option 'kernels', or take 'weights: int8' out of the policy"
    if current_platform.is_cuda()
    else "set VLLM_DISABLED_KERNELS to the kernel's name, or take 'weights: int8' out of the policy"
)


class OneCopyMethod(QuantizeMethodBase):
    """Computes the outputs of a linear with ``product``; ``kernel_name`` is for people."""

    def __init__(self, product: Product, kernel_name: str) -> None:
        self._product = product
        self.kernel_name = kernel_name

    def create_weights(self, layer: nn.Module, *weight_args: object, **extra_weight_attrs: object) -> None:
        raise RuntimeError("the source creates the weights; this is a FlexQuant bug")

    def find_scales(self, layer: LinearBase) -> None:
        """Give ``layer``, a view, its buffers, once the source's kernel has packed its weights."""
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
    variant = source
    for path, layer, kernel in _int4_linears(source):
        its_name = type(kernel).__name__
        if (product := _product(kernel, type(kernel))) is None:
            inputs, outputs = kernel.config.partition_weight_shape
            raise FlexQuantError(
                f"{name}, {path}: INT8 weights cannot be computed from those of {its_name}, whose layout of "
                f"{inputs} inputs and {outputs} outputs is not known; {ADVICE}"
            )
        view = shallow_copy(layer)
        vars(view)["quant_method"] = OneCopyMethod(product, f"{product.precision} from {its_name}")
        variant = with_module(variant, f"{decoder_path(source)}.layers.{path}", view)
    if variant is source:
        raise FlexQuantError(
            f"variant '{name}' has no INT4 linear to compute INT8 weights from; choose a policy without it, "
            "such as w4a16"
        )
    return variant


def readable_kinds(kernel: MPLinearKernel, kinds: Iterable[type[Any]]) -> list[type[Any]]:
    """Return those of ``kinds`` of INT4 kernels whose layout of ``kernel``'s layer is known."""
    return [kind for kind in kinds if _product(kernel, kind) is not None]


def find_scales(models: Iterable[nn.Module]) -> None:
    """Make the variants among ``models`` that compute their weights ready, once all weights are loaded."""
    for layer, method in chain.from_iterable(map(_computing, models)):
        method.find_scales(layer)


def computed_bytes(model: nn.Module) -> int:
    """Return the bytes that a variant takes beside its source: 0 for one that has weights of its own.

    They are the INT8 weights of its largest linear, and for each linear one float32 scale an output channel.
    """
    sizes = [linear_sizes(layer) for layer, _ in _computing(model)]
    return max((i * o for i, o in sizes), default=0) + sum(SCALE_BYTES * o for _, o in sizes)


def _computing(model: nn.Module) -> Iterator[tuple[LinearBase, OneCopyMethod]]:
    """Yield the linears of a model that compute their weights in each pass, with their methods."""
    for module in model.modules():
        if isinstance(module, LinearBase) and isinstance(module.quant_method, OneCopyMethod):
            yield module, module.quant_method


def _int4_linears(model: nn.Module) -> Iterator[tuple[str, LinearBase, MPLinearKernel]]:
    """Yield the linears with INT4 weights below a model's decoder layers, with their paths and kernels."""
    for path, layer in stack_of_layers(model).named_modules():
        kernel = kernel_of_layer(layer)
        if not isinstance(layer, LinearBase) or not isinstance(kernel, MPLinearKernel):
            continue
        if kernel.config.weight_type.size_bits == 4:
            yield path, layer, kernel


def _product(kernel: MPLinearKernel, kind: type[Any]) -> Product | None:
    """Return the product of this device for the weights of ``kernel``'s layer, if ``kind`` keeps them.

    None if that kind's layout is not known.
    """
    if current_platform.is_cpu():
        from flexquant.serving.worker.one_copy import cpu

        of_cpu = cpu.layout_of(kind)
        return None if of_cpu is None else cpu.CPUInt8Product(kernel, of_cpu)
    from flexquant.serving.worker.one_copy import gpu, gpu_layouts

    of_gpu = gpu_layouts.layout_of(kind, kernel.config)
    return None if of_gpu is None else gpu.GPUProduct(kernel, of_gpu)
