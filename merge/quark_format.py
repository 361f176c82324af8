# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read a checkpoint in INT8, as AMD's Quark exports it, as compressed-tensors names its tensors.

A linear has ``weight`` int8 [out, in] and ``weight_scale``, one number or [out], by which its weights are
multiplied. If activations are quantised by numbers that were found before, these are ``input_scale`` and
``input_zero_point``. Quark writes zero points of 0 for what is symmetric. The first pattern of
``layer_quant_config`` that fits a linear's name decides its settings, else ``global_quant_config`` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from flexquant.checkpoint.model_config import ConfigGroup, JsonObject
from flexquant.checkpoint.safetensors_io import TensorRef, load_tensor
from flexquant.errors import FlexQuantError
from flexquant.merge.packed_formats import matrices_in_16_bit, section_by_layer

QUARK = "quark"
FOR_ALL, BY_LAYER = "global_quant_config", "layer_quant_config"
NOT_READ = ("layer_type_quant_config", "kv_cache_quant_config")
"""Keys of settings that vLLM passes over."""
PER_TENSOR, PER_CHANNEL = "per_tensor", "per_channel"


@dataclass(frozen=True)
class Int8Settings:
    """What Quark's settings say of a quantised linear."""

    by_channel: bool
    """Whether each output has a scale of its own."""
    static: bool
    """Whether activations have one stored scale, or each token finds its own."""
    symmetric: bool
    """Whether activations have no zero points."""

    def scheme(self) -> ConfigGroup:
        """Return what a group of compressed-tensors says of its linears."""
        return {
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel" if self.by_channel else "tensor",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": self.symmetric,
                "strategy": "tensor" if self.static else "token",
                "dynamic": not self.static,
            },
        }


def from_quark(
    folder: Path, section: JsonObject, tensors: Mapping[str, TensorRef]
) -> tuple[JsonObject, dict[str, TensorRef]]:
    """Return the ``quantization_config`` and the tensors as compressed-tensors has them.

    No number changes. Raises FlexQuantError for settings that vLLM does not serve, for a scale that is
    missing and for a zero point beside symmetric numbers.
    """
    _check_not_read(folder, section)
    quantised = {
        name.removesuffix(".weight")
        for name, ref in tensors.items()
        if name.endswith(".weight") and ref.dtype == "I8"
    }
    if not quantised:
        raise FlexQuantError(
            f"{folder} has no linear in INT8 (no tensor '*.weight' is I8); export it with weight_format "
            "real_quantized"
        )
    settings = _settings_by_linear(folder, section, sorted(quantised))
    ignored = matrices_in_16_bit(tensors) - quantised
    linears: dict[str, dict[str, TensorRef]] = {module: {} for module in quantised}
    found: dict[str, TensorRef] = {}
    for name, ref in tensors.items():
        linears.get(name.rpartition(".")[0], found)[name] = ref
    for module, parts in linears.items():
        found |= _linear(module, settings[module], parts)
    return section_by_layer(settings, Int8Settings.scheme, "int-quantized", ignored), found


def _linear(module: str, settings: Int8Settings, stored: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
    """Return the tensors of a quantised linear, without zero points that say nothing."""
    parts = dict(stored)
    needed = ["weight_scale"]
    if settings.static:
        needed += ["input_scale"] if settings.symmetric else ["input_scale", "input_zero_point"]
    for part in needed:
        if f"{module}.{part}" not in parts:
            raise FlexQuantError(f"{module}.{part} is missing; get the checkpoint again")
    without = ["weight_zero_point", *(["input_zero_point"] if settings.symmetric else [])]
    for name in (f"{module}.{part}" for part in without):
        if (zeros := parts.pop(name, None)) is not None and bool(load_tensor(zeros).any()):
            raise FlexQuantError(
                f"{name} is not 0, though its settings say symmetric; get the checkpoint again"
            )
    scale = parts[f"{module}.weight_scale"]
    if settings.by_channel and len(scale.shape) == 1:
        parts[scale.name] = replace(scale, shape=(*scale.shape, 1))
    return parts


def _check_not_read(folder: Path, section: JsonObject) -> None:
    export = section.get("export")
    cache = export.get("kv_cache_group") if isinstance(export, dict) else None
    for key, value in ({key: section.get(key) for key in NOT_READ} | {"kv_cache_group": cache}).items():
        if value:
            raise FlexQuantError(
                f"{folder} was quantised by Quark with {key} {value!r}, which is not read; quantise the "
                f"model with settings for all linears or by name ({BY_LAYER}), and without its cache"
            )


def _settings_by_linear(folder: Path, section: JsonObject, linears: Iterable[str]) -> dict[str, Int8Settings]:
    """Return what the settings say of each linear, as vLLM finds them by its name."""
    by_pattern = section.get(BY_LAYER) or {}
    if not isinstance(by_pattern, dict):
        raise FlexQuantError(
            f"{folder} has {BY_LAYER} {by_pattern!r} in its quantization_config, expected an object of "
            "settings by pattern; get the checkpoint again"
        )
    stored = {f"{BY_LAYER} {pattern!r}": own for pattern, own in by_pattern.items() if own is not None}
    stored[FOR_ALL] = section.get(FOR_ALL)
    places = {module: _place(module, by_pattern) for module in linears}
    read = {place: _read_settings(folder, place, stored[place]) for place in sorted(set(places.values()))}
    return {module: read[place] for module, place in places.items()}


def _place(module: str, by_pattern: JsonObject) -> str:
    """Return where a linear's settings are: the first pattern that fits its name, or those for all."""
    for pattern, own in by_pattern.items():
        if fnmatch(module, pattern) if "*" in pattern else module in pattern:
            return FOR_ALL if own is None else f"{BY_LAYER} {pattern!r}"
    return FOR_ALL


def _read_settings(folder: Path, place: str, linears: object) -> Int8Settings:
    """Return what settings say; raise FlexQuantError, naming setting and place, for what vLLM refuses."""
    if not isinstance(linears, dict):
        raise _refusal(folder, f"{place} {linears!r}")
    for key in ("output_tensors", "bias"):
        if linears.get(key):
            raise _refusal(folder, f"{key} {linears[key]!r} in {place}")
    weight, inputs = (_of_tensor(folder, place, linears, key) for key in ("weight", "input_tensors"))
    by_channel, static = weight["qscheme"] == PER_CHANNEL, not inputs["is_dynamic"]
    if (
        weight["dtype"] != "int8"
        or weight["qscheme"] not in (PER_TENSOR, PER_CHANNEL)
        or weight["symmetric"] is not True
        or weight["is_dynamic"]
    ):
        raise _refusal(folder, f"{_described('weight', weight)} in {place}")
    if by_channel and weight["ch_axis"] not in (0, None):
        raise _refusal(folder, f"weight ch_axis {weight['ch_axis']!r} in {place}")
    if inputs["dtype"] != "int8" or inputs["qscheme"] != (PER_TENSOR if static else PER_CHANNEL):
        raise _refusal(folder, f"{_described('input_tensors', inputs)} in {place}")
    return Int8Settings(by_channel, static, inputs["symmetric"] is True)


def _of_tensor(folder: Path, place: str, linears: JsonObject, key: str) -> JsonObject:
    """Return the settings of one tensor, which Quark's releases write by themselves or as a list of one."""
    found = linears.get(key)
    one = found[0] if isinstance(found, list) and len(found) == 1 else found
    if not isinstance(one, dict):
        raise _refusal(folder, f"{key} {found!r} in {place}")
    return {name: one.get(name) for name in ("dtype", "qscheme", "ch_axis", "symmetric", "is_dynamic")}


def _described(key: str, tensor: JsonObject) -> str:
    kinds = ["dynamic" if tensor["is_dynamic"] else "static"]
    kinds += [] if tensor["symmetric"] is True else ["with zero points"]
    return f"{key} {tensor['dtype']} {tensor['qscheme']} {' '.join(kinds)}"


def _refusal(folder: Path, found: str) -> FlexQuantError:
    return FlexQuantError(
        f"{folder} was quantised by Quark with {found}; of Quark, symmetric INT8 weights (one scale, or one "
        "an output: ch_axis 0) with INT8 activations (static per tensor, or dynamic per token) are read: "
        "quantise the model so, or by 'flexquant quantize'"
    )
