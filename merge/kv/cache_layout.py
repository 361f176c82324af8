# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Compare what else changes the KV cache beside the projections: cache scales, and rotations at run time.

`merge_plan` has already checked that heads, positions and the cache's dtype are the same.
"""

from __future__ import annotations

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.safetensors_io import same_bytes
from flexquant.checkpoint.source import Source
from flexquant.merge.kv.variant_weights import CACHE_SCALE

CACHE_TRANSFORMS = ("k_cache", "q_attn", "input", "output")
"""Locations (compressed_tensors.transform.TransformLocation) of transforms that run with the model."""


def rotation_difference(variant: Source, reference: Source) -> str:
    """Return how the run-time rotations of K differ; empty if they do not."""
    a, b = (_cache_transforms(of.quantization_config) for of in (variant, reference))
    if a == b:
        return ""
    return f"rotation of the KV cache is {b!r} in '{reference.name}' and {a!r} in '{variant.name}'"


def scale_difference(variant: Source, reference: Source) -> str:
    """Return which calibrated K or V cache scale differs; empty if none does."""
    a, b = ({n: r for n, r in of.tensors.items() if CACHE_SCALE.search(n)} for of in (variant, reference))
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            return f"only '{(variant if name in a else reference).name}' has the cache scale '{name}'"
        if not same_bytes(a[name], b[name]):
            return f"the cache scale '{name}' differs, and a quantised KV cache needs the same scales"
    return ""


def _cache_transforms(section: JsonObject) -> JsonObject:
    """Return the run-time rotations of K (SpinQuant's R3), by name."""
    groups = (section.get("transform_config") or {}).get("config_groups") or {}
    return {
        name: group
        for name, group in groups.items()
        if any(apply.get("location") in CACHE_TRANSFORMS for apply in group.get("apply", ()))
    }
