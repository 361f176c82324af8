# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read a model's ``config.json`` as plain data, whatever release of which tool wrote it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypedDict

from flexquant.errors import FlexQuantError

JsonObject = dict[str, Any]


class QuantizedNumbers(TypedDict, total=False):
    """How weights or activations are quantised, in a group of compressed-tensors' ``quantization_config``."""

    num_bits: int
    type: Literal["int", "float"]
    symmetric: bool
    strategy: Literal["tensor", "channel", "group", "block", "token"]
    group_size: int | None
    block_structure: list[int]
    actorder: str | None
    dynamic: bool
    """Whether activations are scaled as they arrive."""


class ConfigGroup(TypedDict, total=False):
    """One of the ``config_groups`` of compressed-tensors' ``quantization_config``."""

    targets: list[str]
    """Names or classes of modules, or patterns of names after ``re:``."""
    weights: QuantizedNumbers
    input_activations: QuantizedNumbers | None
    format: str


MAX_LAYERS = 10_000
"""Largest number of layers that a config may state; it bounds the memory of routes."""
SECTIONS = ("quantization_config", "compression_config")
"""Keys of ``config.json`` for the quantisation; the second is llm-compressor's before 2025."""
MODELOPT_FILE = "hf_quant_config.json"
SETTINGS_FILES = ("quantize_config.json", "quant_config.json", MODELOPT_FILE)
"""Files in which AutoGPTQ, AutoAWQ and ModelOpt wrote what ``config.json`` lacks."""
AWQ, GPTQ = "awq", "gptq"
NUMBERS = {"bits": ("w_bit", 4), "group_size": ("q_group_size", 128)}
"""Setting -> the name that AutoAWQ also gives it, and the value of one that is left out."""
TEXTS = ("4", "8")
"""Numbers of bits that some releases wrote as text."""
SWITCHES = {AWQ: {"zero_point": True}, GPTQ: {"sym": True, "desc_act": False}}
"""Method -> setting -> the value of one that is left out."""


def with_section(config: JsonObject, place: str, read: Callable[[str], JsonObject | None]) -> JsonObject:
    """Return the ``config.json`` at ``place`` with a ``quantization_config`` if the model is quantised.

    ``read`` returns a file beside it, or None. Raises FlexQuantError for settings that are no JSON object.
    """
    for key in SECTIONS:
        found = config.get(key)
        if isinstance(found, dict):
            return config | {SECTIONS[0]: found}
        if found is not None:
            raise FlexQuantError(f"{place} has {key} {found!r}, expected an object; get the checkpoint again")
    for file in SETTINGS_FILES:
        if isinstance(section := read(file), dict):
            own = "modelopt" if file == MODELOPT_FILE else "awq" if "zero_point" in section else "gptq"
            return config | {SECTIONS[0]: {"quant_method": own} | section}
    return config


def text_config(config: JsonObject) -> JsonObject:
    """Return the part of a config that describes the language model; a multimodal config nests it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) and nested else config


def reads_more_than_text(config: JsonObject) -> bool:
    """Whether a model also reads images, video or sound."""
    return any(config.get(f"{what}_config") for what in ("vision", "audio"))


def count_layers(config: JsonObject) -> int:
    """Return the number of decoder layers that a config states; raise FlexQuantError if it states none."""
    text = text_config(config)
    kinds = text.get("layers_block_type")  # all that transformers 5 writes for Nemotron-H
    counted = len(kinds) if isinstance(kinds, list) else None
    layers = text.get("num_hidden_layers", text.get("n_layer", counted))
    if type(layers) is not int or not 1 <= layers <= MAX_LAYERS:
        allowed = f"a number from 1 to {MAX_LAYERS}"
        raise FlexQuantError(f"the config has num_hidden_layers {layers!r}, expected {allowed}")
    return layers


def wrong_setting(place: str | Path, key: str, value: object, expected: str) -> FlexQuantError:
    """Return the error for a value in a ``quantization_config``; its message begins with ``place``."""
    problem = f"{place} has {key} {value!r}, expected {expected}, in its quantization_config"
    return FlexQuantError(f"{problem}; correct it, or get the checkpoint again")


def complete_settings(section: JsonObject, place: str | Path, method: str = GPTQ) -> JsonObject:
    """Return a section with each setting by ``method`` once; raise FlexQuantError for one of another type."""
    found = {key: value for key, value in section.items() if value is not None}
    for key, (alias, default) in NUMBERS.items():
        number = found.setdefault(key, found.get(alias, default))
        found.pop(alias, None)
        if number in TEXTS:
            found[key] = number = int(number)
        if type(number) is not int:
            raise wrong_setting(place, key, number, "a whole number")
    for key, is_on in SWITCHES[method].items():
        if not isinstance(found.setdefault(key, is_on), bool):
            raise wrong_setting(place, key, found[key], "true or false")
    return found


def integer_weights(bits: int, symmetric: bool, group_size: int) -> QuantizedNumbers:
    """Return how INT weights in groups of so many inputs are quantised, of all inputs for -1."""
    size = group_size if group_size > 0 else None
    strategy: Literal["group", "channel"] = "group" if size else "channel"
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": size}


def with_groups(section: JsonObject, place: str) -> JsonObject:
    """Return a section with compressed-tensors' ``config_groups``, made up for AWQ and GPTQ."""
    method = section.get("quant_method")
    if method not in (AWQ, GPTQ):
        groups = section.get("config_groups")
        return {**section, "config_groups": groups if isinstance(groups, dict) else {}}
    found = complete_settings(section, place, method)
    symmetric = not found["zero_point"] if method == AWQ else found["sym"]
    weights = integer_weights(found["bits"], symmetric, found["group_size"])
    weights["actorder"] = "group" if weights["group_size"] and found.get("desc_act") else None
    group = ConfigGroup(targets=["Linear"], weights=weights, input_activations=None)
    return {**found, "config_groups": {"group_0": group}}
