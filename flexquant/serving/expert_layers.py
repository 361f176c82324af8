# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Mixture-of-experts layers of several variants side by side.

Like an attention layer, an expert layer registers under its name, and vLLM looks it up by that name in every
pass. Unlike attention layers, each variant keeps its own, with its own weights and kernels: the layers of all
variants but the first get a name of their own. Only the experts themselves are shared, where the checkpoint
holds them once; a layer's router stays with its variant, since it reads that variant's norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from vllm.platforms import current_platform

from flexquant.errors import FlexQuantError
from flexquant.serving.vllm_api import (
    CompressedTensorsWNA16MoEMethod,
    MoERunner,
    UnquantizedFusedMoEMethod,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ADVICE = (
    "keep the experts in 16 bit in every variant (list them in the recipe's 'ignore'), or serve on a device "
    "that has such a kernel"
)


def expert_layers(model: nn.Module) -> list[Any]:
    """Return the mixture-of-experts layers of a model, in order."""
    return list(expert_layers_by_path(model).values())


def expert_layers_by_path(model: nn.Module) -> dict[str, Any]:
    """Return the mixture-of-experts layers of a model by their modules' names, in order."""
    return {path: module for path, module in model.named_modules() if isinstance(module, MoERunner)}


def name_apart(layer: Any, variant: str, context: dict[str, Any]) -> None:
    """Register an expert layer in ``context``, vLLM's layers by name, under a name that is its variant's."""
    layer.layer_name = f"{layer.layer_name}@{variant}"
    context[layer.layer_name] = layer


def only_experts(module: nn.Module) -> nn.Module:
    """Return what holds the experts' weights of an expert layer; any other module as it is."""
    return module.routed_experts if isinstance(module, MoERunner) else module


def experts_kernel_name(layer: Any) -> str:
    """Return the name of the kernel that an expert layer's experts have."""
    method = layer.routed_experts.quant_method
    kernel = getattr(method, "experts_cls", None)
    name = kernel.__name__ if kernel else type(method).__name__
    return f"{name} (16 bit)" if isinstance(method, UnquantizedFusedMoEMethod) else name


def expert_weights(layer: Any) -> int:
    """Return how many weights the experts of a layer have on this rank, in whatever precision."""
    config = layer.routed_experts.moe_config
    one = config.hidden_dim * config.intermediate_size_per_partition
    return config.num_local_experts * one * (3 if config.is_act_and_mul else 2)


def check_precision(variant: str, model: nn.Module, activations: str | None) -> None:
    """Raise :class:`FlexQuantError` where the experts would have other activations than the variant.

    ``activations``: those that a derived variant has in place of 16 bit. On CPUs vLLM multiplies INT4 experts
    with activations in 8 bit, whatever the checkpoint says.
    """
    if not current_platform.is_cpu() or activations == "int8":
        return
    for layer in expert_layers(model):
        if isinstance(layer.routed_experts.quant_method, CompressedTensorsWNA16MoEMethod):
            raise FlexQuantError(
                f"the INT4 experts of variant '{variant}' would have 8-bit activations, the only ones that "
                f"vLLM's kernels for CPUs have; derive a W4A8 variant from '{variant}' in the policy and "
                f"route to that, or {ADVICE}"
            )


@contextmanager
def explained_kernels(variant: str, vllm_config: VllmConfig) -> Iterator[None]:
    """Turn vLLM's refusal to build a variant's experts into a FlexQuantError that tells what to do."""
    try:
        yield
    except (NotImplementedError, ValueError, AssertionError) as e:
        if not vllm_config.model_config.is_moe:
            raise
        said = " ".join(str(e).split()) or "it does not say why"
        raise FlexQuantError(
            f"vLLM cannot build variant '{variant}' of this mixture-of-experts model here ({said}); {ADVICE}"
        ) from e
