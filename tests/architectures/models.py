# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Makes small random models of vLLM's text architectures, from transformers' classes."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.checkpoints import EXPERTS, StateDict, saved_tensors

VALUES: dict[float, str] = {
    320: "vocab_size vocab_size_per_layer_input",
    128: "hidden_size n_embd d_model word_embed_proj_dim shared_expert_intermediate_size "
    "moe_shared_expert_intermediate_size shared_intermediate_size linear_key_head_dim linear_value_head_dim",
    256: "intermediate_size ffn_dim mamba_d_ssm bos_token_id",
    257: "eos_token_id pad_token_id",
    4: "num_hidden_layers n_layer num_attention_heads n_head num_local_experts num_experts n_routed_experts "
    "linear_num_value_heads",
    2: "num_key_value_heads num_experts_per_tok linear_num_key_heads",
    1: "n_shared_experts n_group topk_group first_k_dense_replace mamba_n_groups n_groups",
    32: "head_dim mamba_n_heads mamba_num_heads",
    16: "rotary_dim state_size mamba_d_state ssm_state_size",
    8: "mamba_d_head mamba_head_dim",
    64: "sliding_window hidden_size_per_layer_input moe_intermediate_size mamba_chunk_size "
    "q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim",
    # Of multi-head latent attention, the only width that vLLM's CPU backend has.
    512: "kv_lora_rank",
    2048: "max_position_embeddings n_positions",
    0.08: "initializer_range",
}
SMALL: dict[str, Any] = {name: value for value, names in VALUES.items() for name in names.split()}
"""Values of a configuration's fields. Dimensions are multiples of 64, for INT4 in groups of 64."""
OF_ONE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gemma2", "gemma3_text", "vaultgemma"), {"query_pre_attn_scalar": 32}),
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        **{"num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 32},
    },
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"topk_method": "noaux_tc", "head_dim": 64, "num_key_value_heads": 4},
    "glm4_moe": {"head_dim": 32},
    "glm4_moe_lite": {"head_dim": 64, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    "hrm_text": {"num_hidden_layers": 2, "H_cycles": 1, "L_cycles": 1, "prefix_lm": False},
    "hy_v3": {"first_k_dense_replace": 1},
    "lfm2": {
        **{"block_dim": 128, "conv_dim": 128, "block_auto_adjust_ff_dim": False},
        "layer_types": ["conv", "full_attention"] * 2,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"num_experts_per_tok": 1},
    "longcat_flash": {
        **{"num_layers": 2, "head_dim": 64, "zero_expert_num": 2, "zero_expert_type": "identity"},
        **{"mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    },
    "mamba2": {"num_heads": 8},
    "minicpm3": {"num_key_value_heads": 4},
    "mimo_v2_flash": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        **{"hybrid_layer_pattern": [1, 0, 1, 0], "sliding_window_size": 64, "v_head_dim": 32},
        **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 32},
        **{"swa_v_head_dim": 32, "moe_layer_freq": [0, 1, 1, 1], "layernorm_epsilon": 1e-5},
    },
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "linear_attention", "mlp"]},
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "qwen4_exp_text": {
        **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 64},
        **{"indexer_compress_ratio": 16, "ngram_vocab_size_base": 1000},
    },
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "head_dim": 64},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4_text": {"enable_moe_block": True, "top_k_experts": 2},
}
"""Model type -> further fields that it needs."""
OF_SOLAR = {"bskcn_1": [1], "bskcn_2": [2], "bskcn_3": [2], "bskcn_4": [3], "bskcn_tv": [0.9, 0.8]}
LIKE: dict[str, tuple[str, dict[str, Any]]] = {
    "MiMoForCausalLM": ("qwen2", {}),
    "MiMoV2ForCausalLM": ("mimo_v2_flash", {}),
    "MiniCPMForCausalLM": ("llama", {"scale_emb": 2.0, "scale_depth": 1.4, "dim_model_base": 64}),
    "PanguEmbeddedForCausalLM": ("llama", {"attention_bias": True}),
    "PhiMoEForCausalLM": ("phimoe", {"attention_bias": True, "lm_head_bias": True}),
    "Rnj1ForCausalLM": ("gemma3_text", {}),
    "SolarForCausalLM": ("llama", OF_SOLAR),
    "TeleFLMForCausalLM": ("llama", {"use_mup": True, "mup_scale_factor": 2.0, "output_mult": 1.0}),
}
"""Architectures that transformers lacks -> a model type whose tensors vLLM's class loads, and its fields."""
ROUTERS = "re:.*\\.(gate|router)$"
IN_16_BIT = re.compile(r"(^|\.)(gate|router|shared_expert_gate|kv_b_proj)$")
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.\d+\.")
EXPERT = re.compile(EXPERTS.removeprefix("re:"))


def model_type(architecture: str) -> str | None:
    """Return the model type that transformers has for the name of a class; None if it has none."""
    types = [kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name == architecture]
    return next((kind for kind in types if kind.endswith("_text")), types[0] if types else None)


def source(architecture: str, same_class: Sequence[str]) -> tuple[str, dict[str, Any]] | None:
    """Return the model type to make an architecture of, and fields of its own; None if there is none.

    ``same_class`` are the names for which vLLM has the same class.
    """
    if architecture in LIKE:
        return LIKE[architecture]
    kinds = (model_type(name) for name in (architecture, *same_class))
    return next(((kind, {}) for kind in kinds if kind is not None), None)


def small_config(kind: str, **own: Any) -> PretrainedConfig:
    """Return a small configuration of a model type; transformers derives what follows from the fields."""
    has = {*AutoConfig.for_model(kind).to_dict(), *type(AutoConfig.for_model(kind)).attribute_map}
    fields = {name: value for name, value in SMALL.items() if name in has} | OF_ONE.get(kind, {}) | own
    return AutoConfig.for_model(kind, **fields, dtype="bfloat16")


def random_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Return a random bf16 model; its norms and biases, which start at one and zero, are made uneven."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def in_layer(name: str) -> str:
    """Return a module's name below its decoder layer; published checkpoints may differ above it."""
    return LAYER.split(name)[-1]


def split(model: PreTrainedModel) -> tuple[StateDict, set[str], list[str]]:
    """Return a model's tensors as they are published, the names to quantise, and the linears that are not.

    The linears of the decoder layers are quantised. The others stay in 16 bit, and so do routers, what INT4
    in groups of 64 cannot hold, and what vLLM has no kernel for on every CPU: experts, and latent attention's
    ``kv_b_proj``.
    """
    state = saved_tensors(model)
    linears = {in_layer(name) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    quantised, left_out = set(), []
    for key, tensor in state.items():
        name = key.removesuffix(".weight")
        known = in_layer(name) in linears
        if tensor.ndim != 2 or EXPERT.search(name) or not (known or LAYER.search(name)):
            continue
        if not known:
            left_out.append(name)
        elif not LAYER.search(name):
            left_out.append(f"re:.*{re.escape(name.rpartition('model.')[2])}$")
        elif IN_16_BIT.search(name) or tensor.shape[1] % 64 or tensor.shape[0] % 32:
            left_out.append(name)
        else:
            quantised.add(key)
    if not quantised:
        raise ValueError(
            "no published tensor is the weight of a linear in its decoder layers, as transformers names them"
        )
    return state, quantised, [*left_out, ROUTERS, EXPERTS]


def features(config: PretrainedConfig, state: StateDict) -> list[str]:
    """Return what a model has beyond Llama's layers, as its tensors and its config tell."""
    names = list(state)
    norms = {key for key in names if re.search(r"\.layers\.0\.[a-z_]*norm[a-z_0-9]*\.weight$", key)}
    windows = getattr(config, "layer_types", None) or ["sliding_attention"]
    found = {
        "tied head": getattr(config, "tie_word_embeddings", False),
        "biases": any(re.search(r"\.(q|qkv|k)_proj\.bias$", key) for key in names),
        "norms of Q and K": any(re.search(r"\.(q|k|query|key)_(layer)?norm\.weight$", key) for key in names),
        "more than two norms a layer": len(norms) > 2,
        "attention beside MLP": len(norms) == 1,
        "sliding window": bool(getattr(config, "sliding_window", None)) and "sliding_attention" in windows,
        "latent attention": any("kv_a_proj_with_mqa" in key for key in names),
        "experts": any(".experts." in key or ".block_sparse_moe." in key for key in names),
        "states": any(re.search(r"\.(A_log|conv1d\.weight|conv\.weight)$", key) for key in names),
    }
    return [name for name, has in found.items() if has]
