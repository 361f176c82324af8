# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Build transformers' config and model of a ``config.json`` without trusting it.

Nothing that it names is loaded, fetched or run: kernels of the Hub, Python files beside the weights, other
repositories (FORMAT.md, "What a checkpoint names"). Only the functions import transformers, not this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Any

from flexquant.checkpoint.model_config import JsonObject

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

NOT_BUILT_BY = (
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
    "auto_map",
    "transformers_weights",
    "quantization_config",
)
"""Keys, at any depth, by which transformers would load or run something, and that of the quantisation."""
FLOAT = "__float__"
"""Key of the object that transformers 5 writes for a number that JSON lacks."""
_offline = RLock()


def build_config(config: JsonObject) -> PretrainedConfig:
    """Return transformers' config, with its defaults filled in; raise whatever its class raises."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if (kind := config.get("model_type")) not in CONFIG_MAPPING:
        raise ValueError(f"transformers has no model_type {kind!r}")
    try:
        with nothing_fetched():
            built: PretrainedConfig = AutoConfig.for_model(**_inert(config))
            return built
    except OSError as e:
        raise ValueError(
            f"a model of type {kind!r} is made from another repository, which is not fetched"
        ) from e


def written_or_default(config: JsonObject, key: str) -> object:
    """Return the value of ``key`` in a config or, if it has none, transformers' default for the model.

    The default is None if transformers does not know the model or refuses its config.
    """
    if key in config:
        return config[key]
    try:
        return getattr(build_config(config), key, None)
    except Exception:  # a config class of transformers can raise anything
        return None


def build_model(kind: Any, config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """Return a new model from a config of :func:`build_config`; raise whatever its class raises.

    ``kind`` is one of transformers' AutoModel classes; it gets the ``options``.
    """
    with nothing_fetched():
        model: PreTrainedModel = kind.from_config(config, trust_remote_code=False, **options)
        return model


@contextmanager
def nothing_fetched() -> Iterator[None]:
    """Have Hugging Face's libraries raise an error in the block instead of asking the Hub for a file."""
    from huggingface_hub import constants

    with _offline:
        before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before


def _inert(value: Any) -> Any:
    """Return a part of a ``config.json`` without the keys in NOT_BUILT_BY, and with infinities as numbers."""
    if isinstance(value, dict) and value.keys() == {FLOAT}:
        return float(value[FLOAT])
    if isinstance(value, dict):
        return {key: _inert(part) for key, part in value.items() if key not in NOT_BUILT_BY}
    return [_inert(part) for part in value] if isinstance(value, list) else value
