# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Makes small random checkpoints with a head that predicts further tokens (MTP), named as publishers do."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.architectures.models import random_model, small_config, split
from tests.checkpoints import StateDict, write_checkpoint
from tests.states import FAMILIES

LAYERS = 3
LAST = f"model.layers.{LAYERS}."
"""Where a model with one layer more has what becomes the head's layer."""
NUMBERED = tuple(LAST + name for name in ("enorm", "hnorm", "shared_head.norm", "eh_proj"))
OF_QWEN = ("mtp.fc", "mtp.norm", "mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_embedding")
NORMS = ("token_layernorm", "hidden_layernorm", "final_layernorm")
OF_MIMO = tuple(f"model.mtp_layers.0.{name}" for name in (*NORMS, "input_proj"))
OF_MIMO_V2 = tuple(f"model.mtp.layers.0.{name}" for name in ("enorm", "hnorm", "final_layernorm", "eh_proj"))
WITH_STATES = {**FAMILIES["qwen3_next"], "layer_types": ["linear_attention", *["full_attention"] * LAYERS]}


class Kind(NamedTuple):
    """A family of models, by what its published checkpoints call the head."""

    model_type: str
    architecture: str
    layer: str = LAST
    """Prefix of the head's decoder layer."""
    beside: tuple[str, ...] = NUMBERED
    """The head's other modules."""
    fields: dict[str, Any] = {}  # noqa: RUF012 - read only
    plain: str = "-"
    """End of the names of the layer's weights that vLLM keeps in 16 bit."""


KINDS = {
    "MiMo": Kind(
        *("qwen2", "MiMoForCausalLM", "model.mtp_layers.0.", OF_MIMO), {"tie_word_embeddings": False}
    ),
    "Ernie": Kind(
        *("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", "model.mtp_block.0."),
        ("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0"),
        {"moe_layer_start_index": 1, "moe_layer_end_index": LAYERS - 1},
    ),
    "DeepSeek": Kind("deepseek_v3", "DeepseekV3ForCausalLM"),
    "GLM": Kind("glm4_moe", "Glm4MoeForCausalLM"),
    "GLM-Lite": Kind("glm4_moe_lite", "Glm4MoeLiteForCausalLM"),
    "EXAONE": Kind(
        *("exaone_moe", "ExaoneMoeForCausalLM", "mtp.layers.0.", OF_QWEN),
        {"mlp_layer_types": ["dense", *["sparse"] * (LAYERS - 1), "dense"]},
    ),
    "MiMo-V2": Kind(
        *("mimo_v2_flash", "MiMoV2FlashForCausalLM", "model.mtp.layers.0.", OF_MIMO_V2),
        {
            "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2],
            **{"hybrid_layer_pattern": [1, 0, 1, 1], "add_swa_attention_sink_bias": True},
            **{"moe_layer_freq": [0, 1, 1, 0], "mlp_layer_types": ["dense", "sparse", "sparse", "dense"]},
        },
        "self_attn.o_proj.weight",
    ),
    "Qwen3-Next": Kind("qwen3_next", "Qwen3NextForCausalLM", "mtp.layers.0.", OF_QWEN, WITH_STATES),
    "Qwen3.5": Kind(
        *("qwen3_5_text", "Qwen3_5ForCausalLM", "mtp.layers.0.", OF_QWEN),
        {**WITH_STATES, "mtp_num_hidden_layers": 1},
    ),
}


def is_of_head(name: str) -> bool:
    return "mtp" in name or name.startswith(LAST)


def named(kind: Kind, name: str) -> str:
    """Return the published name of what is in a model with one layer more."""
    found = name.replace(LAST, kind.layer)
    is_of_v2 = found.startswith("model.mtp.layers.0.")
    return found.replace("post_attention_layernorm", "pre_mlp_layernorm") if is_of_v2 else found


def with_head(kind: Kind, state: StateDict, seed: int = 1) -> StateDict:
    """Return a model's tensors, its last layer as the head's, with what a head has beside the layer."""
    generator = torch.Generator().manual_seed(seed)
    hidden = state["model.norm.weight"].numel()
    made = {named(kind, name): tensor for name, tensor in state.items()}
    for module in kind.beside:
        is_norm = "norm" in module
        values = 0.1 * torch.randn((hidden,) if is_norm else (hidden, 2 * hidden), generator=generator)
        made[f"{module}.weight"] = (values + is_norm).to(torch.bfloat16)
    if kind.layer == LAST:
        made[f"{LAST}shared_head.head.weight"] = made["lm_head.weight"].clone()
        made[f"{LAST}embed_tokens.weight"] = made["model.embed_tokens.weight"].clone()
    return made


def make_mtp_pair(
    folder: Path, name: str, *, heads: Collection[str] = ("w8a8", "w4a16"), quantised: Collection[str] = ()
) -> dict[str, Path]:
    """Write w8a8 and w4a16 of one model: those in ``heads`` have the head, in 16 bit if not ``quantised``."""
    kind = KINDS[name]
    config = small_config(kind.model_type, **{"num_hidden_layers": LAYERS + 1, **kind.fields})
    state, weights, left_out = split(random_model(config))
    config.num_hidden_layers, config.num_nextn_predict_layers = LAYERS, 1
    config.architectures = [kind.architecture]
    for key in ("layer_types", "mlp_layer_types", "hybrid_layer_pattern", "moe_layer_freq"):
        if listed := getattr(config, key, None):
            setattr(config, key, listed[:LAYERS])
    weights = {weight.replace(LAST, kind.layer) for weight in weights}
    ignore = [module.replace(LAST, kind.layer) for module in left_out]
    ignore += [module for module in kind.beside if "norm" not in module]
    whole, made = with_head(kind, state), {}
    for scheme in ("w8a8", "w4a16"):
        tensors = {key: whole[key] for key in whole if scheme in heads or not is_of_head(key)}
        of_head = sorted(filter(is_of_head, weights))
        in_16_bit = [name for name in of_head if scheme not in quantised or name.endswith(kind.plain)]
        own = (weights - {*in_16_bit}) & tensors.keys()
        without = [*ignore, *(weight.removesuffix(".weight") for weight in in_16_bit)]
        made[scheme] = write_checkpoint(folder / scheme, config, tensors, scheme, own, without)
    return made
