# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Build a variant with memory for some of its decoder layers alone.

The others are built with their linears and experts on the meta device, so that vLLM's classes find what they
need, and are then removed (:class:`AbsentLayer`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ParamSpec

import torch
from torch import nn

from flexquant.checkpoint.module_names import is_in
from flexquant.serving.vllm_api import AttentionLayerBase
from flexquant.serving.worker.expert_layers import expert_layers
from flexquant.serving.worker.plan_views import stack_of_layers

if TYPE_CHECKING:
    from flexquant.serving.vllm_api import QuantizationConfig, QuantizeMethodBase

Created = ParamSpec("Created")


class AbsentLayer(nn.Module):
    """Takes the place of a decoder layer that no plan takes from its variant."""


@contextmanager
def memory_for(layers: Collection[int], quant_config: QuantizationConfig | None) -> Iterator[None]:
    """Build the linears and experts of all decoder layers but ``layers`` on the meta device."""
    assert quant_config is not None, "every variant is quantised"
    method_of = quant_config.get_quant_method

    def get_quant_method(layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        method = method_of(layer, prefix)
        if method is None or is_in(prefix, layers) or isinstance(layer, AttentionLayerBase):
            return method
        # A method that transforms a linear's inputs wraps the linear's own; all layers share its matrices.
        method_of_weights = getattr(method, "quant_method", method)
        vars(method_of_weights)["create_weights"] = without_memory(method_of_weights.create_weights)
        return method

    vars(quant_config)["get_quant_method"] = get_quant_method
    try:
        yield
    finally:
        del vars(quant_config)["get_quant_method"]


def without_memory(create: Callable[Created, None]) -> Callable[Created, None]:
    """Return a function that creates on the meta device what ``create`` creates."""

    def create_without_memory(*args: Created.args, **kwargs: Created.kwargs) -> None:
        with torch.device("meta"):
            create(*args, **kwargs)

    return create_without_memory


def leave_out(variant: nn.Module, layers: Collection[int], registered: dict[str, nn.Module]) -> None:
    """Remove all decoder layers but ``layers`` from a variant, and their experts from ``registered``.

    Their attention stays registered, as its name has a place in the order of the KV cache's layers.
    """
    stack = stack_of_layers(variant)
    for number in layers_here(variant) - set(layers):
        for experts in expert_layers(stack[number]):
            del registered[experts.layer_name]
        stack[number] = AbsentLayer()


def layers_here(variant: nn.Module) -> set[int]:
    """Return the decoder layers that a variant has on this rank; other ranks' layers are empty modules."""
    return {n for n, layer in enumerate(stack_of_layers(variant)) if any(True for _ in layer.parameters())}
