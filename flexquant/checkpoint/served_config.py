# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read the configuration of a checkpoint that FlexQuant serves: a merged one, or a published one in INT4.

A published checkpoint with INT4 weights is read as a merged one that has the variant ``w4a16`` alone.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from flexquant.checkpoint.folder import check_folder, confined_file, quantization_section, read_json
from flexquant.checkpoint.merged_config import (
    CONFIG_FILE,
    QUANT_METHOD,
    MergedConfig,
    StoredVariant,
    served_architecture,
)
from flexquant.checkpoint.model_config import (
    AWQ,
    GPTQ,
    SECTIONS,
    ConfigGroup,
    JsonObject,
    QuantizedNumbers,
    complete_settings,
    count_layers,
)
from flexquant.documents.yaml_document import read_named
from flexquant.errors import FlexQuantError

VARIANT = "w4a16"
POLICY = "one-copy"
"""Built-in policy by which such a checkpoint is served unless another is given."""


def read_model_config(folder: Path) -> tuple[JsonObject, MergedConfig]:
    """Return the whole ``config.json`` of a merged checkpoint, and its section about the variants.

    A published checkpoint is read by :func:`as_merged`. Raises :class:`FlexQuantError` for other folders.
    """
    try:
        check_folder(folder)
        config = read_json(confined_file(folder, CONFIG_FILE))
        config = with_section(config, quantization_section(folder, config))
    except FlexQuantError as e:
        raise FlexQuantError(f"{e}; give the folder that 'flexquant merge' wrote") from e
    if has_int4(config, str(folder)):
        config = as_merged(config, str(folder))
    try:
        section = config.get("quantization_config")
        merged = MergedConfig.from_json(section if isinstance(section, dict) else {})
        count_layers(config)
        return config, merged
    except FlexQuantError as e:
        raise FlexQuantError(f"{folder / CONFIG_FILE}: {e}") from e


def read_merged_config(folder: Path) -> tuple[MergedConfig, int]:
    """Return what :func:`read_model_config` does of the variants, and the number of decoder layers."""
    config, merged = read_model_config(folder)
    return merged, count_layers(config)


def with_section(config: JsonObject, section: JsonObject | None) -> JsonObject:
    """Return a ``config.json`` with the quantisation that :func:`stored_section` found, if any, in it."""
    return config if section is None else {**config, "quantization_config": section}


def has_int4(config: JsonObject, model: str) -> bool:
    """Whether a published checkpoint's ``config.json`` tells of INT4 weights with 16-bit activations.

    Raises FlexQuantError, which begins with ``model``, for settings of AWQ or GPTQ that are not understood.
    """
    groups = [g for g in _complete(_section(config), model)["config_groups"].values() if isinstance(g, dict)]
    weights = [group.get("weights") for group in groups if not group.get("input_activations")]
    integers = [w for w in weights if isinstance(w, dict) and w.get("type", "int") == "int"]
    return any(w.get("num_bits") == 4 for w in integers)


def is_published_int4(folder: Path | str) -> bool:
    """Whether a folder holds a published checkpoint of INT4 weights; not so if its config is unreadable."""
    try:
        config = read_json(Path(folder) / CONFIG_FILE)
        return has_int4(with_section(config, quantization_section(Path(folder), config)), str(folder))
    except FlexQuantError:
        return False


def why_not_served(config: JsonObject, model: str) -> str | None:
    """Return why FlexQuant does not serve the published checkpoint ``model``; None if it does."""
    section = _section(config)
    if section.get("quant_method") == QUANT_METHOD or has_int4(config, model):
        return None
    found = f"is quantised by {section['quant_method']}" if section.get("quant_method") else "is in 16 bit"
    return (
        f"{model} {found}, and FlexQuant serves checkpoints with INT4 weights as they are "
        "(compressed-tensors, AWQ, GPTQ): vLLM serves this one by itself. For several precisions of the "
        "model, merge two of them with 'flexquant merge'"
    )


def as_merged(config: JsonObject, model: str) -> JsonObject:
    """Return the ``config.json`` of a merged checkpoint of one variant, whose tensors have no prefix.

    ``config`` is that of the published INT4 checkpoint ``model``; a merged one is returned as it is. Raises
    :class:`FlexQuantError` if it names no architecture.
    """
    section = _section(config)
    if section.get("quant_method") == QUANT_METHOD:
        return config
    architecture = next(iter(config.get("architectures") or []), None)
    if not isinstance(architecture, str):
        raise FlexQuantError(
            f"{model} names no architecture in its config.json; give a causal language model"
        )
    merged = MergedConfig(
        base_architecture=architecture,
        variants={VARIANT: StoredVariant("", _complete(section, model))},
        policy=yaml.safe_load(read_named(POLICY, "flexquant.policies", "policy")[0]),
    )
    return {
        **config,
        "architectures": [served_architecture(architecture)],
        "quantization_config": merged.to_json(),
    }


def _section(config: JsonObject) -> JsonObject:
    """Return how a checkpoint's ``config.json`` says that it is quantised; empty if it does not."""
    return next((found for key in SECTIONS if isinstance(found := config.get(key), dict)), {})


def _complete(section: JsonObject, place: str) -> JsonObject:
    """Return a section with compressed-tensors' ``config_groups``, made up for AWQ and GPTQ."""
    method = section.get("quant_method")
    if method not in (AWQ, GPTQ):
        groups = section.get("config_groups")
        return {**section, "config_groups": groups if isinstance(groups, dict) else {}}
    found = complete_settings(section, place, method)
    in_groups = found["group_size"] > 0
    weights: QuantizedNumbers = {
        "num_bits": found["bits"],
        "type": "int",
        "symmetric": not found["zero_point"] if method == AWQ else found["sym"],
        "strategy": "group" if in_groups else "channel",
        "group_size": found["group_size"] if in_groups else None,
        "actorder": "group" if in_groups and found.get("desc_act") else None,
    }
    group = ConfigGroup(targets=["Linear"], weights=weights, input_activations=None)
    return {**found, "config_groups": {"group_0": group}}
