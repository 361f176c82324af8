# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""LoRA: one copy of every adapter, which all variants add to what their linear layers compute.

vLLM's manager goes through the names of a model's modules, wraps every linear layer, and puts an adapter's
matrices into the wrapper of the layer that the adapter names (``model.layers.0.self_attn.q_proj``). The
layers of FlexQuant's model lie below ``variants``. So a plan becomes a child of it too, called ``model`` and
in front of the variants: its layers are found there first, by the names that adapters use. Those of the other
variants are wrapped where they are, and then given the matrices of the layer of the same name. The rest of
the manager's work, to load an adapter into a slot and to tell which sequence takes which, is done once.

An adapter is trained on the inputs that layers have in 16 bit. SmoothQuant and AWQ scale these inputs, and an
adapter's matrices would have to be scaled with them. Stock vLLM does not do that either, and answers wrongly.
Variants with other norms are refused here; other rescaling is refused by ``check_supported``, from what the
merge found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flexquant.errors import FlexQuantError
from flexquant.serving.expert_layers import expert_layers
from flexquant.serving.vllm_api import LinearBase

if TYPE_CHECKING:
    from flexquant.serving.vllm_api import LoRAModelManager

VARIANTS = "variants."
"""What the names of all layers begin with that lie below the model's ``variants``."""
PLAN = "model"
"""The child under which vLLM finds the layers that adapters name."""


def offer_to_adapters(model: Any, plan: nn.Module) -> None:
    """Let vLLM find the layers of ``plan``, a model's first, under the names that adapters use.

    Raises :class:`FlexQuantError` for a base model without LoRA, or with experts.
    """
    first = next(iter(model.variants.values()))
    if not getattr(first, "supports_lora", False):
        raise FlexQuantError(f"vLLM has no LoRA for {type(first).__name__} (drop --enable-lora)")
    if expert_layers(plan):
        raise FlexQuantError("FlexQuant does not support LoRA for mixtures of experts (drop --enable-lora)")
    for variant in model.variants.values():
        # Each view of a plan has an embedding and an lm_head of its own to wrap: adapters of linears alone.
        variant.embedding_modules = {}
    model.packed_modules_mapping = first.packed_modules_mapping
    if hasattr(first, "hf_to_vllm_mapper"):
        model.hf_to_vllm_mapper = first.hf_to_vllm_mapper
    model._modules = {PLAN: plan.model, **model._modules}


def tell_devices(variants: Mapping[str, nn.Module]) -> None:
    """Give layers whose kernel keeps the weight elsewhere (oneDNN) an empty one: vLLM asks for its device."""
    for variant in variants.values():
        for layer in variant.modules():
            if isinstance(layer, LinearBase) and getattr(layer, "weight", layer) is None:
                layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def share_adapters(manager: LoRAModelManager) -> None:
    """Give all variants' layers the matrices of those that ``manager``, which has wrapped them, fills."""
    modules: Any = manager.modules
    for name in [name for name in modules if name.startswith(VARIANTS)]:
        layer = modules.pop(name)
        _, _, name_in_plan = name.removeprefix(VARIANTS).partition(".")
        filled = modules[name_in_plan]
        layer.lora_a_stacked, layer.lora_b_stacked = filled.lora_a_stacked, filled.lora_b_stacked


def check_unsmoothed(norms: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Raise :class:`FlexQuantError` if a norm's weights differ between variants.

    ``norms``: by name and variant, those that variants do not have in common.
    """
    for name, of_variants in norms.items():
        (first, reference), *others = of_variants.items()
        for other, tensor in others:
            if not torch.equal(tensor, reference):
                raise FlexQuantError(
                    f"the variants '{first}' and '{other}' have different weights in {name}: one of them is "
                    "smoothed (SmoothQuant, AWQ), so that LoRA adapters do not fit its layers; quantise "
                    "without smoothing (recipe 'fp8', 'rtn', or one of your own), or merge the adapter into "
                    "the 16-bit model before it is quantised"
                )
