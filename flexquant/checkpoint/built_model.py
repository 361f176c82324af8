# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Ask transformers for the config, tokenizer and model of a ``config.json``, without trusting it.

Nothing that it names is loaded, fetched or run (FORMAT.md, "What a checkpoint names"). Only the functions
import transformers, not this module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from itertools import product
from pathlib import Path
from threading import RLock
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from flexquant.checkpoint.model_config import JsonObject, text_config
from flexquant.errors import FlexQuantError, explained, said_by

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Shapes = dict[str, tuple[int, ...]]
NOT_BUILT_BY = {"attn_implementation", "_attn_implementation", "experts_implementation"}
NOT_BUILT_BY |= {"_experts_implementation", "auto_map", "transformers_weights", "quantization_config"}
"""Keys, at any depth, by which transformers would load or run something, and that of the quantisation."""
FLOAT = "__float__"
"""Key of the object that transformers 5 writes for a number that JSON lacks."""
_offline = RLock()
HEADS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
MAX_NUMBER = 1 << 24
"""Largest value of the keys in HEADS; products of them stay within 63 bits."""
NOT_BUILT = (ValueError, TypeError, KeyError, AttributeError, ImportError)
"""Exceptions that transformers raises if it knows a model, but cannot build it here."""


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
        raise ValueError(f"a {kind!r} model is made from another repository, which is not fetched") from e


def written_or_default(config: JsonObject, key: str) -> object:
    """Return the value of ``key`` in a config; without it transformers' default for the model, or None."""
    if key in config:
        return config[key]
    try:
        return getattr(build_config(config), key, None)
    except Exception:  # a config class of transformers can raise anything
        return None


def build_model(kind: Any, config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """Return a new model of ``kind``, an AutoModel class that gets the ``options``; raise as that does."""
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


def known_config(config: JsonObject, place: str) -> PretrainedConfig | None:
    """Return a config with transformers' defaults, or None; raise FlexQuantError if it is refused."""
    from transformers import CONFIG_MAPPING

    if not isinstance(kind := config.get("model_type"), str) or kind not in CONFIG_MAPPING:
        return None
    try:
        known = build_config(config)
        known.get_text_config().to_dict()
    except Exception as e:  # a config class of transformers can raise anything
        raise _refused(config, place, e) from e
    return known


def language_config(config: JsonObject, source: str | Path) -> Any:
    """Return the language model's config as an object: transformers' or, if it knows none, of the keys."""
    known = known_config(config, str(source))
    return SimpleNamespace(**text_config(config)) if known is None else known.get_text_config()


def check_heads(config: JsonObject, place: str) -> None:
    """Raise FlexQuantError for numbers in HEADS, stated or transformers' defaults, that no model can have."""
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
            found = f"{key} {numbers[key]}, which is no multiple of its {divisor} {numbers[divisor]}"
            raise FlexQuantError(f"{place} has {found}; correct it, or fetch it again")


def _check_range(numbers: JsonObject, place: str) -> None:
    for key, value in numbers.items():
        if value is not None and (type(value) is not int or not 1 <= value <= MAX_NUMBER):
            found, allowed = f"{place} has {key} {value!r}", f"a whole number from 1 to {MAX_NUMBER}"
            raise FlexQuantError(f"{found}, expected {allowed}; correct it, or fetch it again")


def _refused(config: JsonObject, place: str, error: Exception) -> FlexQuantError:
    kind, said = config["model_type"], said_by(error)
    problem = f"{place} does not describe a {kind} model that transformers has ({said})"
    return FlexQuantError(f"{problem}; correct it, or fetch it again")


def one_by_one(shapes: Shapes) -> Shapes:
    """Return the parameters, each expert's apart, whether one tensor holds all experts or not."""
    found = {}
    for name, shape in shapes.items():
        experts, _, fused = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(fused, ())
        if len(shape) != 3 or not parts:
            found[name] = shape
            continue
        for number, part in product(range(shape[0]), parts):
            found[f"{experts}.{number}.{part}.weight"] = (shape[1] // len(parts), shape[2])
    return found


class ModelClass:
    """A model class of transformers, heads included, built with names and shapes of parameters alone."""

    def __init__(self, model: PreTrainedModel) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        self._model = model
        self._conversions: Any = get_model_conversion_mapping(model)
        self._renamings = [change for change in self._conversions if isinstance(change, WeightRenaming)]
        self.shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        """Shapes of what the class loads, by its own names."""

    def name_of(self, tensor: str) -> str:
        """Return the class's own name for a tensor of a checkpoint; experts stay apart."""
        from transformers.core_model_loading import rename_source_key

        prefix = self._model.base_model_prefix
        renamed, _ = rename_source_key(tensor, self._renamings, [], prefix, self.shapes)
        return tensor if renamed not in self.shapes and tensor in self.shapes else renamed

    def drops(self, tensor: str) -> bool:
        """Whether the class leaves a checkpoint's tensor out on purpose, such as a head that drafts."""
        patterns = self._model._keys_to_ignore_on_load_unexpected or ()
        return any(re.search(pattern, self.name_of(tensor)) for pattern in patterns)

    def check(self, shapes: Mapping[str, tuple[int, ...]], place: str) -> None:
        """Raise FlexQuantError, which names ``place``, unless unquantised ``shapes`` are those of the class.

        What the class ties to another parameter, or does not need, may be absent.
        """
        import torch
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig
        from transformers.utils import logging

        tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        conversions, on = self._conversions, {"": "meta"}
        loading = LoadStateDictConfig(device_map=on, weight_mapping=conversions, ignore_mismatched_sizes=True)
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            # None: tp_plan, which transformers 5.15 requires and later ones lack, or disk_offload_index.
            found, _ = convert_and_load_state_dict_in_model(self._model, tensors, loading, None)
        finally:
            if shown:
                logging.enable_progress_bar()
        self._model._adjust_missing_and_unexpected_keys(found)
        ties = self._model.all_tied_weights_keys
        mismatched = {name: stored for name, stored, _ in found.mismatched_keys}
        if wrong := [name for name in self.shapes if name in mismatched]:
            stored, needed = list(mismatched[wrong[0]]), list(self.shapes[wrong[0]])
            expected = f"the model that its config.json describes has {needed} there"
            found_there = f"'{wrong[0]}' has shape {stored} in {place}"
            raise FlexQuantError(f"{found_there}, but {expected}; fetch or quantise it again")
        missing = [x for x in self.shapes if {x, ties.get(x, x)} <= found.missing_keys]
        apart = {self.name_of(name): shape for name, shape in shapes.items()} if missing else {}
        if missing := [x for x in missing if not one_by_one({x: self.shapes[x]}).items() <= apart.items()]:
            of = f"of the parameters of a {type(self._model).__name__}, '{missing[0]}' or a part of it first"
            raise FlexQuantError(f"{place} lacks {len(missing)} {of}; download or quantise the model again")


def find_model_class(config: JsonObject, place: str) -> ModelClass | None:
    """Return the class that a ``config.json`` names; None if transformers lacks it or cannot build it."""
    try:
        return _find(json.dumps(config, sort_keys=True), place)
    except NOT_BUILT:
        return None


@lru_cache(maxsize=4)
def _find(written: str, place: str) -> ModelClass | None:
    import torch
    import transformers
    from transformers.initialization import no_init_weights

    config = json.loads(written)
    known = known_config(config, place)
    architecture: Any = getattr(transformers, str(next(iter(config.get("architectures") or ()), "")), None)
    if known is None or not isinstance(known, getattr(architecture, "config_class", None) or ()):
        return None
    try:
        with torch.device("meta"), no_init_weights(), nothing_fetched():
            model: PreTrainedModel = architecture._from_config(known, attn_implementation="eager")
    except NOT_BUILT:
        raise
    except Exception as e:  # arithmetic with the config's numbers can raise anything
        raise _refused(config, place, e) from e
    return ModelClass(model)


def load_tokenizer(model: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or id; raise FlexQuantError if it is broken or has its own code."""
    from transformers import AutoTokenizer

    problem = f"the tokenizer of {model} cannot be read"
    fetching = nothing_fetched() if Path(model).is_dir() else nullcontext()
    # The tokenizers library raises plain Exceptions for a broken file.
    with fetching, explained(problem, "put its files beside the weights", (Exception,)):
        return AutoTokenizer.from_pretrained(str(model), trust_remote_code=False)
