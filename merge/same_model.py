# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Find how two configs differ in what a server reads, whatever release of which tool wrote them."""

from __future__ import annotations

from flexquant.checkpoint.known_models import known_config
from flexquant.checkpoint.model_config import ABSENT, JsonObject, config_differences

Difference = tuple[str, object, object]
"""Dotted key, value in the first, value in the second."""

NOT_READ = {
    "It says where the files come from.": (
        "_commit_hash",
        "_from_model_config",
        "_name_or_path",
        "license",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
    ),
    "It says how transformers' own model runs; vLLM's model runs in its own way.": (
        "_attn_implementation",
        "_attn_implementation_autoset",
        "chunk_size_feed_forward",
        "output_attentions",
        "output_hidden_states",
        "pretraining_tp",
        "return_dict",
        "tf_legacy_loss",
        "torchscript",
        "use_bfloat16",
        "use_cache",
    ),
    "It acts in training alone.": (
        "attention_dropout",
        "attn_pdrop",
        "embd_pdrop",
        "gradient_checkpointing",
        "hidden_dropout",
        "output_router_logits",
        "resid_pdrop",
        "router_aux_loss_coef",
    ),
    "It describes another task than writing text.": (
        "classifier_dropout",
        "finetuning_task",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "pruned_heads",
        "task_specific_params",
    ),
    "The generation settings are compared by themselves (`generation.py`).": (
        "bos_token_id",
        "decoder_start_token_id",
        "do_sample",
        "eos_token_id",
        "max_length",
        "min_length",
        "pad_token_id",
        "repetition_penalty",
        "sep_token_id",
        "temperature",
        "top_k",
        "top_p",
    ),
    "The tokenizers are compared by what they do (`same_tokenizer.py`).": ("tokenizer_class",),
    "It describes the quantisation, which may differ.": ("compression_config", "quantization_config"),
}
"""Reason -> keys of a config that may differ between variants of one model."""
IGNORED = frozenset(key for keys in NOT_READ.values() for key in keys)


def model_differences(a: JsonObject, b: JsonObject) -> list[Difference]:
    """Return every difference that a server would notice; empty for two configs of one model.

    Releases of transformers differ in which default values they write. If one config lacks a key, the other's
    value, null included, is therefore compared with transformers' default. Raises FlexQuantError for a config
    that transformers refuses.
    """
    found = list(config_differences(a, b, IGNORED))
    if found and all(x is ABSENT or y is ABSENT for _, x, y in found):
        found = list(config_differences(_with_defaults(a), _with_defaults(b), IGNORED))
    shown = [(key, _or_null(x), _or_null(y)) for key, x, y in found]
    return [(key, x, y) for key, x, y in shown if x is not None or y is not None]


def _or_null(value: object) -> object:
    return None if value is ABSENT else value


def _with_defaults(config: JsonObject) -> JsonObject:
    """Return the config with transformers' defaults filled in; unchanged if it does not know the model."""
    known = known_config(config, "config.json")
    return config if known is None else known.to_dict()
