# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Serve mixture-of-experts layers of several variants in one model.

Like an attention layer, an expert layer registers under its name, and vLLM looks it up by that name in every
pass. Unlike attention layers, each variant keeps its own expert layers, with its own weights and kernels, so
the layers of all variants but the first are renamed. Only experts that the checkpoint stores once are shared;
a layer's router stays with its variant, since it reads that variant's norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

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


def expert_layers(model: nn.Module) -> list[MoERunner]:
    """Return the mixture-of-experts layers of a model, in order."""
    return list(expert_layers_by_path(model).values())


def expert_layers_by_path(model: nn.Module) -> dict[str, MoERunner]:
    """Return module name -> mixture-of-experts layer of a model, in order."""
    return {path: module for path, module in model.named_modules() if isinstance(module, MoERunner)}


def name_apart(layer: MoERunner, variant: str, context: dict[str, nn.Module]) -> None:
    """Register an expert layer in ``context``, vLLM's layers by name, under a name with its variant."""
    layer.layer_name = f"{layer.layer_name}@{variant}"
    context[layer.layer_name] = layer


def only_experts(module: nn.Module) -> nn.Module:
    """Return the module with the experts' weights of an expert layer; return other modules unchanged."""
    return module.routed_experts if isinstance(module, MoERunner) else module


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


def check_precision(variant: str, model: nn.Module, activations: str | None) -> None:
    """Raise :class:`FlexQuantError` if the experts would have other activations than the variant.

    ``activations`` is the precision of a derived variant's activations, None for 16 bit. On CPUs vLLM
    multiplies INT4 experts with 8-bit activations, whatever the checkpoint says.
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
    """Turn vLLM's refusal to build a variant's experts into a FlexQuantError that says what to do."""
    try:
        yield
    except (NotImplementedError, ValueError, AssertionError) as e:
        if not vllm_config.model_config.is_moe:
            raise
        said = " ".join(str(e).split()) or "it does not say why"
        raise FlexQuantError(
            f"vLLM cannot build variant '{variant}' of this mixture-of-experts model here ({said}); {ADVICE}"
        ) from e
