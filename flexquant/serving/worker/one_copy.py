# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Derive W8A8 without a second copy of the weights: each linear computes INT8 weights from INT4 in each pass.

The variant is a view of its source, the W4A16 variant: it has the source's modules, but for each INT4 linear
a view of that linear with another method. The method reads the weights where the source's kernel keeps them,
in that kernel's layout, and writes INT8 weights with one scale a channel into memory that all layers share.
An INT8 product with 8-bit activations follows. Layers in other precisions, and experts, compute as in the
source.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import nn
from vllm.platforms import current_platform

from flexquant.checkpoint.model_config import JsonObject
from flexquant.errors import FlexQuantError
from flexquant.serving.vllm_api import LinearBase, MPLinearKernel, QuantizeMethodBase
from flexquant.serving.worker.linear_kernels import kernel_of_layer, linear_sizes
from flexquant.serving.worker.plan_views import shallow_copy, stack_of_layers, with_module

if TYPE_CHECKING:
    from flexquant.serving.cpu.one_copy import Layout

CHANNEL_SCALE = "flexquant_channel_scale"
"""Buffer of a layer's view: the scales of its INT8 weights, float32 [outputs]."""


def layer_problem(weights: JsonObject) -> str | None:
    """Return, as a relative clause, why INT4 weights cannot be computed with in INT8; None if they can.

    ``weights``: of a group of the checkpoint's ``quantization_config``.
    """
    if weights.get("actorder") in ("group", "dynamic"):
        return "whose groups are ordered by activation (actorder 'group')"
    return None


def check_device(what: str) -> None:
    """Raise :class:`FlexQuantError` on a device for which there is no such product; ``what`` asks for it."""
    if not current_platform.is_cpu():
        raise FlexQuantError(
            f"{what} with 'weights: int8', which runs on CPUs alone so far; derive with 'weights: int4'"
        )


class OneCopyMethod(QuantizeMethodBase):
    """Multiplies in INT8 by the weights that ``kernel`` keeps in INT4."""

    def __init__(self, kernel: MPLinearKernel, layout: Layout) -> None:
        self.kernel = kernel
        self._layout = layout

    @property
    def kernel_name(self) -> str:
        """Name of the kernel, for people."""
        return f"INT8 from {type(self.kernel).__name__}"

    def create_weights(self, layer: nn.Module, *weight_args: object, **extra_weight_attrs: object) -> None:
        raise RuntimeError("the source creates the weights; this is a FlexQuant bug")

    def find_scales(self, layer: LinearBase) -> None:
        """Find the channels' scales of ``layer``, a view, once the source's kernel has packed its weights."""
        from flexquant.serving.cpu.one_copy import channel_scales

        inputs = linear_sizes(layer)[0]
        scales = channel_scales(*self._weights(layer), inputs, self._layout)
        layer._buffers = {**layer._buffers, CHANNEL_SCALE: scales}

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return [..., outputs] for ``x`` [..., inputs], in its dtype."""
        channel_scale = layer._buffers[CHANNEL_SCALE]
        out: torch.Tensor = torch.ops.flexquant.one_copy_linear(
            x.reshape(-1, x.shape[-1]),
            *self._weights(layer),
            channel_scale,
            bias,
            self._layout.block,
            self._layout.in_halves,
        )
        return out.reshape(*x.shape[:-1], out.shape[-1])

    def _weights(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        from flexquant.serving.cpu.one_copy import scale_and_zero

        return getattr(layer, self.kernel.w_q_name), *scale_and_zero(self.kernel, layer)


def one_copy_of(source: nn.Module, name: str) -> nn.Module:
    """Return the variant ``name``, a view of ``source``, whose weights are not loaded yet.

    Raises :class:`FlexQuantError` if no linear of a decoder layer has INT4 weights in a known layout.
    """
    views: dict[str, nn.Module] = {}
    for path, layer in stack_of_layers(source).named_modules():
        if isinstance(layer, LinearBase) and (method := _method(layer, f"{name}, {path}")) is not None:
            views[path] = shallow_copy(layer)
            vars(views[path])["quant_method"] = method
    if not views:
        raise FlexQuantError(
            f"variant '{name}' has no INT4 linear to compute INT8 weights from; take it out of the policy"
        )
    layers = stack_of_layers(source)
    path_of_layers = next(path for path, module in source.named_modules() if module is layers)
    for path, view in views.items():
        source = with_module(source, f"{path_of_layers}.{path}", view)
    return source


def find_scales(models: Iterable[nn.Module]) -> None:
    """Make the variants among ``models`` that compute their weights ready, once all weights are loaded."""
    for module in chain.from_iterable(model.modules() for model in models):
        if isinstance(module, LinearBase) and isinstance(module.quant_method, OneCopyMethod):
            module.quant_method.find_scales(module)


def _method(layer: LinearBase, place: str) -> OneCopyMethod | None:
    """Return the method for a linear with INT4 weights; None for another linear."""
    from flexquant.serving.cpu.one_copy import layout_of

    kernel = kernel_of_layer(layer)
    if not isinstance(kernel, MPLinearKernel) or kernel.config.weight_type.size_bits != 4:
        return None
    layout = layout_of(type(kernel))
    if layout is None:
        raise FlexQuantError(
            f"{place}: INT8 weights cannot be computed from those of {type(kernel).__name__}, whose layout "
            f"is not known; set VLLM_DISABLED_KERNELS={type(kernel).__name__}"
        )
    return OneCopyMethod(kernel, layout)
