# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Compare two variants: cache scales and rotations, the basis of their streams, and what each layer computes.

`merge_plan` has already checked that heads, positions and the cache's dtype are the same.
"""

from __future__ import annotations

from concurrent.futures import Executor

import torch

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.safetensors_io import load_tensor
from flexquant.checkpoint.source import Source
from flexquant.errors import FlexQuantError
from flexquant.merge.kv.head_comparison import logits_difference
from flexquant.merge.kv.layer_comparison import LayerComparison, RowsCached, equal
from flexquant.merge.kv.residual_basis import ResidualBasis, compare_bases
from flexquant.merge.kv.skeleton import Skeleton
from flexquant.merge.kv.variant_weights import CACHE_SCALE, VariantWeights

KV_ADVICE = (
    "quantise both from the same 16-bit model without smoothing or rotating K and V "
    "(AWQ: no v_proj -> o_proj mapping; SpinQuant and QuIP: no rotation of attention heads)"
)
RESIDUAL_ADVICE = "use plans that run all layers in one variant, or quantise both without rotation"
CACHE_TRANSFORMS = ("k_cache", "q_attn", "input", "output")
"""Locations (compressed_tensors.transform.TransformLocation) of transforms that run with the model."""


class Pair:
    """A variant and the reference that it is compared with. Several threads compare layers at a time."""

    def __init__(self, variant: VariantWeights, reference: VariantWeights, skeleton: Skeleton) -> None:
        self.variant, self.reference = variant, reference
        self._skeleton = skeleton
        self.names = f"variants '{reference.source.name}' and '{variant.source.name}'"
        self.basis: ResidualBasis
        self._rows_cached: RowsCached = {}
        self.residual_message = ""
        """Why their layers cannot be mixed; empty if nothing was found against it."""

    @property
    def mixable(self) -> bool:
        return not self.residual_message

    def cache_and_basis_difference(self, pool: Executor) -> str:
        """Return the first difference in K's rotations, cache scales, modules outside the layers or basis."""
        for find_difference in (rotation_difference, scale_difference):
            if difference := find_difference(self.variant.source, self.reference.source):
                return difference
        of_variant, of_reference = self.variant.before_layers(), self.reference.before_layers()
        for name in sorted(of_variant.keys() | of_reference.keys()):
            if not equal(of_variant.get(name), of_reference.get(name)):
                return f"'{name}', which all layers compute with, is not equal in both"
        self.compare_bases(pool)
        difference = self.basis.difference
        if self.basis.related:
            weights = (self.variant, self.reference)
            difference = pool.submit(
                logits_difference, *weights, self._skeleton, self.basis.rotation
            ).result()
        return f"{difference}, so they are not copies of one model" if difference else ""

    def compare_bases(self, pool: Executor) -> None:
        self.basis = compare_bases(self.variant, self.reference, pool)
        if not self.basis.same:
            self.forbid_mixing(f"their residual streams lie in different bases: {self.basis.difference}")

    def refusal(self, difference: str) -> str:
        return f"{self.names} cannot share a KV cache: {difference}; {KV_ADVICE}"

    def forbid_mixing(self, difference: str) -> None:
        self.residual_message = (
            f"{self.names} cannot be mixed layer by layer: {difference}; {RESIDUAL_ADVICE}"
        )

    def compare_layer(self, layer: int) -> LayerComparison:
        weights, rotation = (self.variant, self.reference), self.basis.rotation
        try:
            return LayerComparison(self._skeleton, layer, weights, rotation, self._rows_cached).run()
        except FlexQuantError:
            raise
        except Exception as e:  # the code of a model in transformers can raise anything
            raise FlexQuantError(
                f"layer {layer} of {self.names} cannot be run by transformers ({type(e).__name__}: {e}), so "
                "its cache cannot be compared; update transformers"
            ) from e


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
        x, y = (load_tensor(of[name]).flatten().double() for of in (a, b))
        if not torch.equal(x, y):  # NaN equals nothing
            return f"the cache scale '{name}' differs or is no number; a quantised KV cache needs the same"
    return ""


def _cache_transforms(section: JsonObject) -> JsonObject:
    """Return the run-time rotations of K (SpinQuant's R3), by name."""
    groups = (section.get("transform_config") or {}).get("config_groups") or {}
    return {
        name: group
        for name, group in groups.items()
        if any(apply.get("location") in CACHE_TRANSFORMS for apply in group.get("apply", ()))
    }
