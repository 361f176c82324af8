# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Ask transformers about a model: its config with all defaults, and its tokenizer.

Only the functions import transformers, not this module.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from flexquant.checkpoint.built_model import build_config, nothing_fetched
from flexquant.checkpoint.model_config import JsonObject, text_config
from flexquant.errors import FlexQuantError, explained

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

HEADS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
MAX_NUMBER = 1 << 24
"""Largest value of the keys in HEADS; products of them stay within 63 bits."""

NOT_BUILT = (ValueError, TypeError, KeyError, AttributeError, ImportError)
"""Exceptions that transformers raises if it knows a model, but cannot build it here."""


def known_config(config: JsonObject, place: str) -> PretrainedConfig | None:
    """Return a config with transformers' defaults filled in; None for a model that it does not know.

    Raises FlexQuantError, which begins with ``place``, for a config that transformers refuses.
    """
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return None
    try:
        known = build_config(config)
        known.get_text_config().to_dict()
    except Exception as e:  # a config class of transformers can raise anything
        raise refused(config, place, e) from e
    return known


def check_heads(config: JsonObject, place: str) -> None:
    """Check the numbers in HEADS that a config states, or else transformers' defaults for them.

    Raises FlexQuantError, which begins with ``place``, for numbers that no model can have, and for a config
    that transformers refuses.
    """
    written = text_config(config)
    _check_range({key: written[key] for key in HEADS if type(written.get(key)) is int}, place)
    known = known_config(config, place)  # transformers divides by the numbers, so check them before
    text = known and known.get_text_config()
    stated, names = (written, {}) if text is None else (text.to_dict(), text.attribute_map)
    numbers: JsonObject = {key: stated.get(names.get(key, key)) for key in HEADS}
    _check_range(numbers, place)
    divided = [("num_attention_heads", "num_key_value_heads")]
    if numbers["head_dim"] is None and not stated.get("kv_lora_rank"):  # latent attention has other widths
        divided.append(("hidden_size", "num_attention_heads"))
    for key, divisor in divided:
        if numbers[key] and numbers[divisor] and numbers[key] % numbers[divisor]:
            raise FlexQuantError(
                f"{place} has {key} {numbers[key]}, which is no multiple of its {divisor} "
                f"{numbers[divisor]}; correct it, or fetch it again"
            )


def _check_range(numbers: JsonObject, place: str) -> None:
    for key, value in numbers.items():
        if value is not None and (type(value) is not int or not 1 <= value <= MAX_NUMBER):
            raise FlexQuantError(
                f"{place} has {key} {value!r}, expected a whole number from 1 to {MAX_NUMBER}; correct it, "
                "or fetch it again"
            )


def refused(config: JsonObject, place: str, error: Exception) -> FlexQuantError:
    """Return the error for a config that transformers refuses; it begins with ``place``."""
    problem = " ".join(str(error).split()) or type(error).__name__
    return FlexQuantError(
        f"{place} does not describe a {config['model_type']} model that transformers has ({problem}); "
        "correct it, or fetch it again"
    )


def load_tokenizer(model: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or Hugging Face id.

    Raises FlexQuantError if it cannot be read or needs code of its own, which is not run.
    """
    from transformers import AutoTokenizer

    problem = f"the tokenizer of {model} cannot be read"
    fetching = nothing_fetched() if Path(model).is_dir() else nullcontext()
    # The tokenizers library raises plain Exceptions for a broken file.
    with fetching, explained(problem, "put its files beside the weights", (Exception,)):
        return AutoTokenizer.from_pretrained(str(model), trust_remote_code=False)
