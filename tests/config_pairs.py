# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Pairs of configs: as two releases of transformers write those of one model, and of models that differ."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.architectures.models import small_config
from tests.vision import KINDS

Config = dict[str, Any]
TEXT = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "gemma2", "gemma3_text"),
    *("phi3", "granite", "glm4", "smollm3", "exaone4", "olmo2", "falcon_h1", "qwen3_next", "lfm2", "cohere2"),
)
VISION = ("mistral3", "qwen2_5_vl", "idefics3", "gemma3")
TIED = "tie_word_embeddings"
DUMPED: Config = {
    **{"add_cross_attention": False, "is_decoder": False, "tf_legacy_loss": False, "torchscript": False},
    **{"tie_encoder_decoder": False, "use_bfloat16": False, "bad_words_ids": None, "prefix": None},
    **{"cross_attention_hidden_size": None, "num_beams": 1, "temperature": 1.0, "pruned_heads": {}},
}
"""What transformers 4 wrote of every part of a model, as the defaults of its base class."""


class Pair(NamedTuple):
    name: str
    a: Config
    b: Config
    alike: bool
    """Whether vLLM makes the same of both."""


def as_transformers_4_wrote_it(config: Config) -> Config:
    """Spread RoPE over the config, call the dtype torch_dtype, and leave out what it left out."""
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    old |= {"torch_dtype": config["dtype"], "transformers_version": "4.57.1"}
    for part in ("text_config", "vision_config"):
        if isinstance(config.get(part), dict):
            old[part] = as_transformers_4_wrote_it({"dtype": config["dtype"], **config[part]}) | DUMPED
    rope = config.get("rope_parameters")
    if rope is None:
        return old
    if "sliding_attention" in rope:  # Gemma 3 as first published
        old |= {"rope_theta": rope["full_attention"]["rope_theta"], "rope_scaling": None}
        old |= {"rope_local_base_freq": rope["sliding_attention"]["rope_theta"]}
        old |= {"sliding_window_pattern": old.pop("_sliding_window_pattern")}
        for key in ("layer_types", "tie_word_embeddings", "use_bidirectional_attention"):
            del old[key]
        return old
    beside = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    scaling = {key: value for key, value in rope.items() if key not in beside}
    return {**old, **beside, "rope_scaling": None if scaling == {"rope_type": "default"} else scaling}


def config_of(kind: str) -> Config:
    """Return the config of a small model, as the installed transformers writes it."""
    if kind in VISION:
        return KINDS[kind].config().to_dict() | {"architectures": [KINDS[kind].architecture]}
    return small_config(kind).to_dict() | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]}


def without_what_follows(config: Config) -> Config:
    """Leave out the widths of heads and kinds of layers that transformers derives from the rest."""
    for key in ("head_dim", "layer_types"):
        less = {name: value for name, value in config.items() if name != key}
        made = AutoConfig.for_model(**less).to_dict().get(key)
        width = config["hidden_size"] // config["num_attention_heads"]
        if key in config and (made == config[key] or (made is None and config[key] == width)):
            config = less
    return config


SAME: dict[str, list[Config]] = {
    "llama": [
        {"use_mrope": False, "quantization": {"bits": 4}, "trust_remote_code": True, "bias": False},
        {"model_max_length": 2048, "mlp_bias": False, "auto_map": {"AutoConfig": "code.Config"}},
        {"head_dim": None, "pretraining_tp": 2},
    ],
    "mistral": [{"head_dim": None}],
    "qwen2": [{"head_dim": 32, "rope_scaling": None, "initializer_range": 0.5}],
    "mixtral": [{"head_dim": None, "output_router_logits": True}],
    "gemma2": [{"hidden_act": "gelu_pytorch_tanh"}],
    "exaone4": [{"sliding_window_pattern": "LLLG"}],
    "mistral3": [
        {"text_config.use_mrope": False, "vision_config.quantization": {}},
        {"text_config.head_dim": None, "text_config.architectures": ["MistralForCausalLM"]},
    ],
}
"""Kind -> edits of its config by which vLLM makes no other model of it."""
OTHER: dict[str, list[Config]] = {
    "llama": [
        {"rope_theta": 20000.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        *({"bias": True}, {"attention_bias": True}, {"tie_word_embeddings": True}),
        *({"torch_dtype": "float16"}, {"model_max_length": 77}),
    ],
    "mistral": [{"sliding_window": 32}, {"sliding_window": None}, {"head_dim": 64}],
    "qwen2": [{"rms_norm_eps": 1e-4}],
    "qwen3": [{"attention_bias": True}],
    "qwen2_moe": [{"num_experts_per_tok": 3}],
    "qwen3_moe": [{"norm_topk_prob": True}, {"decoder_sparse_step": 2}],
    "mixtral": [{"num_experts_per_tok": 1}],
    "gemma2": [{"final_logit_softcapping": 20.0}, {"attn_logit_softcapping": None}]
    + [{"query_pre_attn_scalar": 64}],
    "gemma3_text": [{"rope_local_base_freq": 20000.0}, {"sliding_window_pattern": 2}],
    "phi3": [{"partial_rotary_factor": 0.5}],
    "granite": [{"embedding_multiplier": 12.0}, {"residual_multiplier": 0.22}, {"logits_scaling": 8.0}],
    "glm4": [{"partial_rotary_factor": 0.25}],
    "smollm3": [{"no_rope_layers": [1, 1, 1, 1]}],
    "exaone4": [{"layer_types": ["full_attention"] * 4}],
    "olmo2": [{"rms_norm_eps": 1e-4}],
    "falcon_h1": [{"key_multiplier": 0.5}],
    "qwen3_next": [{"partial_rotary_factor": 0.5}, {"output_gate_type": "sigmoid"}],
    "lfm2": [{"conv_bias": True}],
    "cohere2": [{"logit_scale": 0.5}],
    "mistral3": [{"text_config.rope_theta": 20000.0}, {"vision_config.hidden_act": "silu"}],
    "idefics3": [{"scale_factor": 4}],
    "qwen2_5_vl": [{"vision_config.fullatt_block_indexes": [0]}],
    "gemma3": [{"text_config.final_logit_softcapping": 20.0}],
}
"""Kind -> edits of its config of which vLLM makes another model."""


def pairs() -> Iterator[Pair]:
    """Yield the pairs: each kind of model as releases 4 and 5 write it, and SAME and OTHER of the former."""
    for kind in (*TEXT, *VISION):
        new = config_of(kind)
        old = as_transformers_4_wrote_it(new) | DUMPED
        yield Pair(f"{kind} by both releases", new, without_what_follows(old) if kind in TEXT else old, True)
    nested = config_of("qwen2_5_vl")
    flat = without_what_follows(nested["text_config"]) | nested
    del flat["text_config"]
    yield Pair("qwen2_5_vl without a text_config", nested, flat, True)
    mistral = as_transformers_4_wrote_it(config_of("mistral3"))
    top, text = mistral | {TIED: True}, _edited(mistral, {f"text_config.{TIED}": True})
    del top["text_config"][TIED], text[TIED]
    yield Pair("mistral3 with its tie at either level", top, text, True)
    for edits, alike in ((SAME, True), (OTHER, False)):
        for kind, edit in ((kind, edit) for kind, of_kind in edits.items() for edit in of_kind):
            new = config_of(kind)
            yield Pair(f"{kind} with {edit}", new, _edited(as_transformers_4_wrote_it(new), edit), alike)


def _edited(config: Config, edit: Config) -> Config:
    for key, value in edit.items():
        part, _, inner = key.rpartition(".")
        config = config | ({part: config[part] | {inner: value}} if part else {key: value})
    return config
