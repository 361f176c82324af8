# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Serve W8A8 without a copy of its weights: each linear computes INT8 weights from INT4 in each pass.

A *derived* variant has the INT8 weights nearest to those of its source, a W4A16 variant: one copy. A
*nested* variant stores, for each of its own INT8 weights, a difference of 4 bits from what the INT4 weights
predict.

1. *Build*: the source gets INT4 kernels whose layout of weights is known: those that ``cpu.layout_of`` and
   ``gpu_layouts.layout_of`` know. A derived variant is a view of the source, with a view of each INT4 linear
   that has another method (:class:`OneCopyMethod`). A nested one is a model of its own, whose linears have
   parameters for what is stored (:class:`NestedMethod`).
2. *Load*: then :func:`make_ready` gives each linear of a view one scale a channel, and packs differences as
   the source's kernel packs weights.
3. *Pass*: the method reads the weights where the source's kernel keeps them, writes INT8 weights into memory
   that all layers share, and multiplies in INT8; on Blackwell, which has no such product, one copy is in FP8.

Layers in other precisions, and experts, compute as in the source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.platforms import current_platform

from flexquant.checkpoint.nested import count_exceptions
from flexquant.errors import FlexQuantError
from flexquant.serving.kernels.layers import kernel_of_layer, linear_sizes
from flexquant.serving.refusals import check_one_copy_device
from flexquant.serving.vllm_api import (
    LinearBase,
    MPLinearKernel,
    QuantizeMethodBase,
)
from flexquant.serving.worker.one_copy.operands import DIFFERENCE, EXCEPTIONS, PLACES, NestedWeights
from flexquant.serving.worker.plan_views import (
    decoder_path,
    shallow_copy,
    stack_of_layers,
    with_module,
)

if TYPE_CHECKING:
    from flexquant.serving.vllm_api import QuantizationConfig
    from flexquant.serving.worker.one_copy.cpu import CPUInt8Product
    from flexquant.serving.worker.one_copy.gpu import GPUProduct

    Product = CPUInt8Product | GPUProduct
    """Multiplies in 8 bit by the weights that the INT4 kernel of one device keeps."""

FACTOR_BYTES = 8
"""Bytes of two float32 numbers for each output of a view: its scale, and the inverse."""
ADVICE = (
    "Marlin's and Humming's are, for multiples of 128 inputs and 64 outputs: drop --linear-backend and the "
    "option 'kernels', or take 'weights: int8' out of the policy"
    if current_platform.is_cuda()
    else "set VLLM_DISABLED_KERNELS to the kernel's name, or take 'weights: int8' out of the policy"
)


class OneCopyMethod(QuantizeMethodBase):
    """Computes the outputs of a linear by INT8 weights that are not stored."""

    _source: LinearBase | None = None
    """The linear with the INT4 weights; None: the view itself."""
    _product: Product
    kernel_name = ""
    """For people."""
    _relation = "from"

    def read(self, layer: LinearBase, where: str) -> None:
        """Choose how to read the weights of ``layer``, whose kernel is known; ``where`` is for the message.

        Raises :class:`FlexQuantError` if the kernel's layout is not known.
        """
        kernel = kernel_of_layer(layer)
        assert isinstance(kernel, MPLinearKernel)
        its_name = type(kernel).__name__
        if (product := _product(kernel, type(kernel))) is None:
            inputs, outputs = kernel.config.partition_weight_shape
            raise FlexQuantError(
                f"{where}: INT8 weights cannot be computed from those of {its_name}, whose layout of "
                f"{inputs} inputs and {outputs} outputs is not known; {ADVICE}"
            )
        self._product, self.kernel_name = product, f"{product.precision} {self._relation} {its_name}"

    def create_weights(self, layer: nn.Module, *weight_args: Any, **extra_weight_attrs: Any) -> None:
        raise RuntimeError("the source creates the weights; this is a FlexQuant bug")

    def make_ready(self, layer: LinearBase) -> None:
        """Give ``layer`` its buffers, once the source's kernel has packed its weights."""
        layer._buffers = {**layer._buffers, **self._product.prepare(layer)}

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return [..., outputs] for ``x`` [..., inputs], in its dtype."""
        source = layer if self._source is None else self._source
        out = self._product.multiply(source, layer._buffers, x.reshape(-1, x.shape[-1]), bias)
        return out.reshape(*x.shape[:-1], out.shape[-1])


class NestedMethod(OneCopyMethod):
    """Computes the outputs of a linear that stores what the INT4 weights of ``source`` lack for its own."""

    _relation = "nested in"

    def __init__(self, source: LinearBase) -> None:
        self._source = source

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        *_: Any,
        weight_loader: Callable[..., None],
        **__: Any,
    ) -> None:
        """Create parameters for a :class:`NestedWeights`; exceptions are those of all ranks' inputs."""
        inputs, outputs = input_size_per_partition, sum(output_partition_sizes)
        number = count_exceptions(input_size)
        parts = {
            "difference": (
                torch.empty(outputs, inputs // 2, dtype=torch.uint8),
                {"output_dim": 0, "input_dim": 1},
            ),
            "row": (torch.empty(outputs, 1, dtype=torch.float32), {"output_dim": 0}),
            "scale": (torch.empty(outputs, 1, dtype=torch.float32), {"output_dim": 0}),
            "exception": (torch.empty(outputs, number, dtype=torch.int8), {"output_dim": 0}),
            "exception_input": (torch.empty(outputs, number, dtype=torch.uint16), {"output_dim": 0}),
            # Those of linears that vLLM fuses are equal.
            "column": (torch.empty(inputs, dtype=torch.float32), {"input_dim": 0, "ignore_warning": True}),
        }
        for name, (data, dimensions) in parts.items():
            parameter = nn.Parameter(data, requires_grad=False)
            vars(parameter).update(dimensions, weight_loader=weight_loader)
            layer.register_parameter(f"weight_{name}", parameter)
        layer.register_parameter("weight", None)  # as of kernels that keep weights under no name

    def make_ready(self, layer: LinearBase) -> None:
        assert self._source is not None
        names = ("scale", "row", "column", "difference", "exception_input", "exception")
        scale, row, column, difference, places, exceptions = (
            layer.get_parameter(f"weight_{part}").data for part in names
        )
        inputs = len(column)
        first = 0 if inputs == layer.input_size else layer.tp_rank * inputs
        places = places.int() - first
        places[(places < 0) | (places >= inputs)] = -1
        nested = NestedWeights(scale.flatten(), row.flatten(), column, difference, places, exceptions)
        buffers = self._product.prepare(self._source, nested)
        for part, name in zip(names[3:], (DIFFERENCE, PLACES, EXCEPTIONS), strict=True):
            layer.register_parameter(f"weight_{part}", nn.Parameter(buffers[name], requires_grad=False))
        layer._buffers = {**layer._buffers, **buffers}


def one_copy_of(source: nn.Module, name: str) -> nn.Module:
    """Return the variant ``name``, a view of ``source``, whose weights are not loaded yet.

    Raises :class:`FlexQuantError` if no linear of a decoder layer has INT4 weights in a known layout.
    """
    check_one_copy_device(f"the policy derives '{name}'")
    variant = source
    for path, layer in _int4_linears(source):
        view, method = shallow_copy(layer), OneCopyMethod()
        method.read(layer, f"{name}, {path}")
        vars(view)["quant_method"] = method
        variant = with_module(variant, f"{decoder_path(source)}.layers.{path}", view)
    if variant is source:
        raise FlexQuantError(
            f"variant '{name}' has no INT4 linear to compute INT8 weights from; choose a policy without it, "
            "such as w4a16"
        )
    return variant


@contextmanager
def nesting_in(source: nn.Module | None, quant_config: QuantizationConfig | None) -> Iterator[None]:
    """Build the linears of a variant for which ``source`` has INT4 weights as nested in these.

    None: no variant is nested. ``quant_config`` is the variant's.
    """
    if source is None:
        yield
        return
    assert quant_config is not None, "every variant is quantised"
    int4 = {layer.prefix: layer for _, layer in _int4_linears(source)}
    method_of = quant_config.get_quant_method

    def get_quant_method(layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        return NestedMethod(int4[prefix]) if prefix in int4 else method_of(layer, prefix)

    vars(quant_config)["get_quant_method"] = get_quant_method
    try:
        yield
    finally:
        vars(quant_config).pop("get_quant_method", None)


def read_sources(variant: nn.Module, name: str) -> None:
    """Choose how the nested linears of a variant read INT4 weights, once all kernels are chosen.

    Raises :class:`FlexQuantError` if a layout is not known.
    """
    for layer, method in _computing(variant):
        if method._source is not None:
            method.read(method._source, f"{name}, {layer.prefix}")


def readable_kinds(kernel: MPLinearKernel, kinds: Iterable[type[Any]]) -> list[type[Any]]:
    """Return those of ``kinds`` of INT4 kernels whose layout of ``kernel``'s layer is known."""
    return [kind for kind in kinds if _product(kernel, kind) is not None]


def make_ready(models: Iterable[nn.Module]) -> None:
    """Make the variants among ``models`` that compute their weights ready, once all weights are loaded."""
    for layer, method in chain.from_iterable(map(_computing, models)):
        method.make_ready(layer)


def computed_bytes(model: nn.Module) -> int:
    """Return the bytes that a variant takes beside its source and its own parameters, to compute weights.

    They are the INT8 weights of its largest linear and, for each linear of a view, the factors of its
    outputs. 0 for a variant whose weights are stored.
    """
    linears = list(_computing(model))
    sizes = [linear_sizes(layer) for layer, _ in linears]
    of_views = [linear_sizes(layer)[1] for layer, method in linears if not isinstance(method, NestedMethod)]
    return max((i * o for i, o in sizes), default=0) + FACTOR_BYTES * sum(of_views)


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
        if not isinstance(layer, LinearBase) or not isinstance(kernel, MPLinearKernel):
            continue
        if kernel.config.weight_type.size_bits == 4:
            yield path, layer


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
