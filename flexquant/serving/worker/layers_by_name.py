# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Serve layers of several variants that vLLM looks up by name in a pass, and that hold linears of their own.

Unlike attention layers, these cannot be shared: each variant keeps its own, with its own weights and kernels.
The first variant's has the name that vLLM gave it; the others' names have their variant's in addition.

*Experts*: only those that the checkpoint stores once are shared. Routers stay, as they read a variant's norm.

*Layers that keep a state* (linear attention, Mamba, short convolutions): all variants read and write *one*
state, the cache of the first variant's layer. The others ask for no cache, so they are in no group of vLLM's
KV cache, and their `kv_cache` is the first layer's. vLLM also describes a pass to each layer by name:
`forward_pass` has the description of the first layer given to the others.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform

from flexquant.errors import FlexQuantError, said_by
from flexquant.serving.config import merged_of
from flexquant.serving.kernels.layers import expert_layers
from flexquant.serving.vllm_api import CompressedTensorsWNA16MoEMethod, LinearBase, MambaBase

APART = "@"
"""Separates a layer's name from its variant; no module's name has it."""
ADVICE = (
    "keep the experts in 16 bit in every variant (list them in the recipe's 'ignore'), or serve on a device "
    "that has such a kernel"
)


def check_precision(variant: str, model: nn.Module, activations: str | None) -> None:
    """Raise :class:`FlexQuantError` if the experts would have other activations than the variant.

    ``activations``: of a derived variant; None: 16 bit. On CPUs vLLM always gives INT4 experts 8-bit ones.
    """
    if not current_platform.is_cpu() or activations == "int8":
        return
    for layer in expert_layers(model):
        if isinstance(layer.routed_experts.quant_method, CompressedTensorsWNA16MoEMethod):
            problem = f"the INT4 experts of variant '{variant}' would have 8-bit activations"
            why = "the only ones that vLLM's kernels for CPUs have"
            advice = f"derive a W4A8 variant from '{variant}' in the policy and route to that, or {ADVICE}"
            raise FlexQuantError(f"{problem}, {why}; {advice}")


@contextmanager
def explained_kernels(variant: str, vllm_config: VllmConfig) -> Iterator[None]:
    """Turn vLLM's refusal to build a variant's experts into a FlexQuantError that says what to do."""
    try:
        yield
    except (NotImplementedError, ValueError, AssertionError) as e:
        if not vllm_config.model_config.is_moe:
            raise
        problem = f"vLLM cannot build variant '{variant}' of this mixture of experts here ({said_by(e)})"
        raise FlexQuantError(f"{problem}; {ADVICE}") from e


def own_name(layer_name: str) -> str:
    """Return the name that vLLM gave to a layer, from one that may have a variant's name behind it."""
    return layer_name.partition(APART)[0]


def keep_state(
    name: str, layer: nn.Module, variant: str, context: dict[str, nn.Module], models: Iterable[nn.Module]
) -> None:
    """Have a variant's layer keep the state called ``name``, or share that of a variant before.

    Decoder layers are looked up in ``models``: names do not always tell them (Falcon-H1's ``model.4.mixer``).
    """
    built = {module for model in models for module in model.modules()}
    if layer in built and context[name] in built:
        share_state(layer, variant, context)
    elif layer in built:
        context[name] = layer


def share_state(layer: Any, variant: str, context: dict[str, nn.Module]) -> None:
    """Register a variant's layer in ``context``, vLLM's layers by name, with the state of the first one."""
    name = own_name(layer.prefix)
    if not shares_state(layer):
        its_class: Any = type(layer)
        layer.__class__ = _with_the_state_of_another(its_class)
    vars(layer)["state_of"] = context[name]  # not as a module of this one
    layer.prefix = f"{name}{APART}{variant}"
    context[layer.prefix] = layer


def share_states_of_view(view: nn.Module, variant: str, context: dict[str, nn.Module]) -> None:
    """Register the layers of a variant that is a view of another, where they are copies of that one's."""
    layers: list[Any] = [module for module in view.modules() if isinstance(module, MambaBase)]
    for layer in layers:
        if layer is not context[layer.prefix]:
            share_state(layer, variant, context)


def is_state_layer_or_its_convolution(module: nn.Module) -> bool:
    """Whether a module is a layer with a state, or the convolution of one, of whose weights it has a view."""
    is_convolution = isinstance(module, LinearBase) and getattr(getattr(module, "weight", 0), "ndim", 0) == 3
    return isinstance(module, MambaBase) or is_convolution


@functools.cache
def _with_the_state_of_another(layer_class: Any) -> type[nn.Module]:
    """Return a class of layers like ``layer_class`` that compute on the state of another, ``state_of``."""

    class SharesState(layer_class):
        @property
        def kv_cache(self) -> tuple[torch.Tensor, ...]:
            return self.state_of.kv_cache

        @kv_cache.setter
        def kv_cache(self, value: object) -> None:
            """Do nothing: where vLLM takes the caches off all layers, it takes the first one's too."""

        def get_kv_cache_spec(self, vllm_config: VllmConfig) -> None:
            """Ask for no cache."""

    return SharesState


def shares_state(layer: object) -> bool:
    """Whether a layer computes on the state of another one."""
    return hasattr(layer, "state_of")


def sharers(context: Mapping[str, object]) -> dict[str, list[str]]:
    """Return the name of a layer with a state -> the names under which other variants' layers share it."""
    found: dict[str, list[str]] = {}
    for name, layer in context.items():
        if shares_state(layer):
            found.setdefault(own_name(name), []).append(name)
    return found


class HybridModel:
    """What vLLM asks a model about its states, answered by the base architecture's class."""

    variants: nn.ModuleDict

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> Any:
        return base_class(vllm_config).get_mamba_state_shape_from_config(vllm_config)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> Any:
        return base_class(vllm_config).get_mamba_state_dtype_from_config(vllm_config)

    def get_mamba_state_copy_func(self) -> Any:
        """Answer vLLM before 0.32, which asks for one tuple for all kinds of states."""
        return self._first_variant().get_mamba_state_copy_func()

    def get_mamba_state_copy_funcs(self, mamba_types: set[Any]) -> Any:
        return self._first_variant().get_mamba_state_copy_funcs(mamba_types)

    def _first_variant(self) -> Any:
        return next(iter(self.variants.values()))


def base_class(vllm_config: VllmConfig) -> Any:
    """Return vLLM's class for the architecture that was merged."""
    model_config = vllm_config.model_config
    architecture = merged_of(model_config).base_architecture
    return ModelRegistry.resolve_model_cls([architecture], model_config=model_config)[0]
