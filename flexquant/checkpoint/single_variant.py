# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read a published checkpoint with INT4 weights as a merged one that has the variant ``w4a16`` alone."""

from __future__ import annotations

from typing import Any

import yaml

from flexquant.checkpoint.merged_config import QUANT_METHOD, MergedConfig, StoredVariant, served_architecture
from flexquant.checkpoint.model_config import JsonObject
from flexquant.documents.named_files import read_named
from flexquant.errors import FlexQuantError

VARIANT = "w4a16"
POLICY = "one-copy"
"""Built-in policy by which such a checkpoint is served unless another is given."""


def is_merged(config: JsonObject) -> bool:
    """Whether a ``config.json`` is that of a merged checkpoint."""
    return _section(config).get("quant_method") == QUANT_METHOD


def as_merged(config: JsonObject, model: str) -> JsonObject:
    """Return the ``config.json`` of a merged checkpoint of one variant, whose tensors have no prefix.

    ``config`` is that of the published checkpoint ``model``; a merged one is returned as it is. Raises
    :class:`FlexQuantError` for a checkpoint without INT4 weights in one of the formats that vLLM serves by
    the same kernels: compressed-tensors, AWQ and GPTQ.
    """
    if is_merged(config):
        return config
    architecture = next(iter(config.get("architectures") or []), None)
    if not isinstance(architecture, str):
        raise FlexQuantError(
            f"{model} names no architecture in its config.json; give a causal language model"
        )
    section = _section(config)
    groups = _groups(section)
    if not any((group.get("weights") or {}).get("num_bits") == 4 for group in groups.values()):
        found = (
            f"is quantised by {section['quant_method']}" if section.get("quant_method") else "is in 16 bit"
        )
        raise FlexQuantError(
            f"{model} {found}, and FlexQuant serves checkpoints with INT4 weights as they are (compressed-"
            "tensors, AWQ, GPTQ); serve it without '--config-format flexquant', or merge two precisions of "
            "the model with 'flexquant merge'"
        )
    merged = MergedConfig(
        base_architecture=architecture,
        variants={VARIANT: StoredVariant("", {**section, "config_groups": groups})},
        policy=yaml.safe_load(read_named(POLICY, "flexquant.policies", "policy")[0]),
    )
    return {
        **config,
        "architectures": [served_architecture(architecture)],
        "quantization_config": merged.to_json(),
    }


def _section(config: JsonObject) -> dict[str, Any]:
    """Return how a checkpoint is quantised; older compressed-tensors wrote ``compression_config``."""
    for key in ("quantization_config", "compression_config"):
        if isinstance(section := config.get(key), dict):
            return section
    return {}


def _groups(section: dict[str, Any]) -> JsonObject:
    """Return compressed-tensors' ``config_groups``, made up for AWQ and GPTQ."""
    method = section.get("quant_method")
    if method == "awq":
        symmetric, size = not section.get("zero_point", True), section.get("q_group_size")
    elif method == "gptq":
        symmetric, size = section.get("sym", True), None
    else:
        groups: JsonObject = section.get("config_groups") or {}
        return groups
    weights = {
        "num_bits": section.get("bits", section.get("w_bit")),
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": section.get("group_size", size),
        "actorder": "group" if section.get("desc_act") else None,
    }
    return {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
