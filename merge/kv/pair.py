# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Compare two variants: the basis of their residual streams, and layer by layer what they compute."""

from __future__ import annotations

from concurrent.futures import Executor

from flexquant.errors import FlexQuantError
from flexquant.merge.kv.cache_layout import rotation_difference, scale_difference
from flexquant.merge.kv.layer_comparison import LayerComparison, RowsCached, equal
from flexquant.merge.kv.residual_basis import ResidualBasis, compare_bases
from flexquant.merge.kv.skeleton import Skeleton
from flexquant.merge.kv.variant_weights import VariantWeights

KV_ADVICE = (
    "quantise both from the same 16-bit model without smoothing or rotating K and V "
    "(AWQ: no v_proj -> o_proj mapping; SpinQuant and QuIP: no rotation of attention heads)"
)
RESIDUAL_ADVICE = "use plans that run all layers in one variant, or quantise both without rotation"


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
        """Return the first difference in K's rotations, cache scales, modules before the layers or basis."""
        for find_difference in (rotation_difference, scale_difference):
            if difference := find_difference(self.variant.source, self.reference.source):
                return difference
        of_variant, of_reference = self.variant.before_layers(), self.reference.before_layers()
        for name in sorted(of_variant.keys() | of_reference.keys()):
            if not equal(of_variant.get(name), of_reference.get(name)):
                return f"'{name}', which all layers compute with, is not equal in both"
        self.compare_bases(pool)
        if self.basis.related:
            return ""
        return f"{self.basis.difference}, so they are not copies of one model"

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
