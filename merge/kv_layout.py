# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The KV cache's shape and meaning as the configs state it: heads, positions, cache scales, rotations."""

from __future__ import annotations

import re
from typing import Any

from flexquant.merge.effective_maps import EffectiveMaps
from flexquant.merge.safetensors_io import same_bytes

# Next to the head counts: whatever decides how K is turned by its position, or which positions are kept.
POSITION_KEYS = (
    "partial_rotary_factor",
    "rope_local_base_freq",
    "no_rope_layers",
    "sliding_window",
    "layer_types",
    "kv_lora_rank",
)
CACHE_SCALE = re.compile(r"\.([kv]_(scale|zero_point)|[kv]_proj\.output_(scale|zero_point))$")
CACHE_TRANSFORMS = ("k_cache", "q_attn")  # compressed_tensors.transform.TransformLocation


def layout_difference(maps: EffectiveMaps, reference: EffectiveMaps) -> str:
    """Return what differs between two KV-cache layouts; empty when nothing does."""
    a, b = _layout(maps), _layout(reference)
    for key in b:
        if a[key] != b[key]:
            return f"{key} is {b[key]!r} in '{reference.source.name}' and {a[key]!r} in '{maps.source.name}'"
    return ""


def scale_difference(maps: EffectiveMaps, reference: EffectiveMaps) -> str:
    """Return which calibrated K or V cache scale differs; empty when none does."""
    a, b = ({n: r for n, r in m.source.tensors.items() if CACHE_SCALE.search(n)} for m in (maps, reference))
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            return f"only '{(maps if name in a else reference).source.name}' has the cache scale '{name}'"
        if not same_bytes(a[name], b[name]):
            return f"the cache scale '{name}' differs, and a quantised KV cache needs the same scales"
    return ""


def _layout(maps: EffectiveMaps) -> dict[str, Any]:
    section = maps.source.quantization_config
    return {
        "num_hidden_layers": maps.num_layers,
        "num_key_value_heads": maps.kv_heads,
        "head_dim": maps.head_dim,
        "rope_parameters": _rope(maps.config),
        **{key: maps.config.get(key) for key in POSITION_KEYS},
        "kv_cache_scheme": section.get("kv_cache_scheme"),
        "rotation of the KV cache": _cache_transforms(section),
    }


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return the RoPE parameters as transformers 5 writes them; 4 wrote rope_theta and rope_scaling."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if all(isinstance(value, dict) for value in rope.values()) and rope:
        return rope  # one set per kind of layer (Gemma 3)
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", config.get("rope_theta"))
    return rope


def _cache_transforms(section: dict[str, Any]) -> dict[str, Any]:
    """Return the rotations that are applied to K at run time (SpinQuant's R3), by name."""
    groups = (section.get("transform_config") or {}).get("config_groups") or {}
    return {
        name: group
        for name, group in groups.items()
        if any(apply.get("location") in CACHE_TRANSFORMS for apply in group.get("apply", ()))
    }
