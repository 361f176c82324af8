# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Serve LoRA adapters: all variants add one copy of each adapter to their linear layers' outputs.

vLLM's manager wraps every linear layer that it finds by name, and puts an adapter's matrices into the wrapper
of the layer that the adapter names (``model.layers.0.self_attn.q_proj``). FlexQuant's layers lie below
``variants``. So a plan also becomes a child of the model, named ``model`` and before the variants: vLLM finds
its layers there first. Layers of the other variants are wrapped where they are, and then share the matrices
of the layer with the same name.

An adapter is trained on the 16-bit model's inputs of a layer. SmoothQuant and AWQ scale these inputs, and
neither FlexQuant nor vLLM scales the adapter's matrices, so answers would be wrong. Variants with different
norms are refused here; ``check_supported`` refuses other rescaling, which the merge has recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flexquant.errors import FlexQuantError
from flexquant.serving.kernels.layers import expert_layers
from flexquant.serving.refusals import FOR_ADAPTERS
from flexquant.serving.vllm_api import LinearBase

if TYPE_CHECKING:
    from flexquant.serving.vllm_api import LoRAModelManager

VARIANTS = "variants."
"""Prefix of the names of all layers below the model's ``variants``."""
PLAN = "model"
"""Name of the child under which vLLM finds the layers that adapters name."""


def offer_to_adapters(model: Any, plan: nn.Module) -> None:
    """Have vLLM find the layers of ``plan`` by adapters' names; refuse experts, and models without LoRA."""
    first = next(iter(model.variants.values()))
    if not getattr(first, "supports_lora", False):
        raise FlexQuantError(f"vLLM has no LoRA for {type(first).__name__} (drop --enable-lora)")
    if expert_layers(plan):
        raise FlexQuantError("FlexQuant does not support LoRA for mixtures of experts (drop --enable-lora)")
    for variant in model.variants.values():
        # Support adapters of linears only: each view of a plan has its own embedding and lm_head to wrap.
        variant.embedding_modules = {}
    model.packed_modules_mapping = first.packed_modules_mapping
    if hasattr(first, "hf_to_vllm_mapper"):
        model.hf_to_vllm_mapper = first.hf_to_vllm_mapper
    model._modules = {PLAN: plan.model, **model._modules}


def tell_devices(variants: Mapping[str, nn.Module]) -> None:
    """Give layers whose kernel keeps the weight elsewhere (oneDNN) an empty weight; vLLM reads its device."""
    for variant in variants.values():
        for layer in variant.modules():
            if isinstance(layer, LinearBase) and getattr(layer, "weight", layer) is None:
                layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def share_adapters(manager: LoRAModelManager) -> None:
    """Give layers of all variants the adapter matrices of the wrapped layers that ``manager`` fills."""
    modules = manager.modules
    for name in [name for name in modules if name.startswith(VARIANTS)]:
        layer = modules.pop(name)
        _, _, name_in_plan = name.removeprefix(VARIANTS).partition(".")
        filled = modules[name_in_plan]
        layer.lora_a_stacked, layer.lora_b_stacked = filled.lora_a_stacked, filled.lora_b_stacked


def check_unsmoothed(norms: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Raise :class:`FlexQuantError` if a norm's weights differ; ``norms``: name -> variant -> own weights."""
    for name, of_variants in norms.items():
        (first, reference), *others = of_variants.items()
        for other, tensor in others:
            if not torch.equal(tensor, reference):
                found = f"the variants '{first}' and '{other}' have different weights in {name}"
                found += ": one of them is smoothed (SmoothQuant, AWQ)"
                raise FlexQuantError(f"{found}, so that LoRA adapters do not fit its layers; {FOR_ADAPTERS}")
