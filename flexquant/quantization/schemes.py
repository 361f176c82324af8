# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How each scheme quantises a model: llmcompressor's modifiers, which linears and which norms.

Every recipe here leaves the KV cache alone, so that variants can share one: SmoothQuant folds scales from a
norm into the linears that read it, and never from v_proj into o_proj, which would rescale V.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flexquant.errors import FlexQuantError

IGNORED = ["lm_head"]
GROUP_SIZES = (128, 64, 32)


@dataclass(frozen=True)
class Scheme:
    """How to quantise one variant."""

    preset: str
    """The scheme's name in compressed-tensors."""
    grouped: bool
    """Whether weight scales belong to groups of input features, not to output channels."""
    smoothing_strength: float | None = None
    """SmoothQuant's alpha, 0 to 1: how much of the activations' range moves into the weights; None: off."""


SCHEMES = {
    "w8a8": Scheme("W8A8", grouped=False, smoothing_strength=0.5),
    "w4a16": Scheme("W4A16", grouped=True),
}

ATTENTION = [r"re:.*self_attn\.q_proj$", r"re:.*self_attn\.k_proj$", r"re:.*self_attn\.v_proj$"]
MLP = [r"re:.*mlp\.gate_proj$", r"re:.*mlp\.up_proj$"]

# The norm that feeds the MLP. A model type is listed once its norms are known to feed nothing else.
MLP_NORM = {
    "llama": "post_attention_layernorm",
    "mistral": "post_attention_layernorm",
    "qwen2": "post_attention_layernorm",
    "qwen3": "post_attention_layernorm",
    "gemma": "post_attention_layernorm",
    "gemma2": "pre_feedforward_layernorm",
    "gemma3_text": "pre_feedforward_layernorm",
}


def quantized_linears(config: Any) -> dict[str, int]:
    """Return the input features of every linear that is quantised, by name, from a model's configuration."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as e:
        raise FlexQuantError(f"'{config.model_type}' is not a language model that transformers knows") from e
    return {
        name: module.in_features
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name not in IGNORED
    }


def choose_group_size(input_features: Mapping[str, int]) -> int:
    """Return the largest group size that divides every linear's input features, given by module name.

    Raises FlexQuantError, naming the first linear that no group size divides.
    """
    for size in GROUP_SIZES:
        if all(k % size == 0 for k in input_features.values()):
            return size
    name, k = next((name, k) for name, k in input_features.items() if k % GROUP_SIZES[-1])
    raise FlexQuantError(
        f"{name} has {k} input features, which none of the group sizes {', '.join(map(str, GROUP_SIZES))} "
        "divides; choose a scheme without groups, such as w8a8"
    )


def smoothing_mappings(model_type: str) -> list[list[Any]]:
    """Return SmoothQuant's mappings from a norm to all linears that read it; none for unknown models."""
    if model_type not in MLP_NORM:
        return []
    return [[ATTENTION, r"re:.*\.input_layernorm$"], [MLP, rf"re:.*\.{MLP_NORM[model_type]}$"]]


def build_recipe(scheme: Scheme, group_size: int | None, mappings: list[list[Any]]) -> list[Any]:
    """Return llmcompressor's modifiers for a scheme; ``group_size`` is for grouped ones."""
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    preset = preset_name_to_scheme(scheme.preset, ["Linear"])
    if scheme.grouped:
        preset.weights.group_size = group_size
    recipe: list[Any] = []
    if mappings:
        recipe.append(SmoothQuantModifier(smoothing_strength=scheme.smoothing_strength, mappings=mappings))
    # Static activation order needs no g_idx, which kernels would have to follow at run time.
    recipe.append(GPTQModifier(config_groups={"group_0": preset}, ignore=IGNORED, actorder="static"))
    return recipe
