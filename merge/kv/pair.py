# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Two variants, layer by layer: do they write the same K and V, and the same to the residual stream?"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field

import torch

from flexquant.checkpoint.safetensors_io import TensorRef, same_bytes
from flexquant.merge.kv.agreement import OUTPUT_NOISE_FACTOR, OUTPUT_ROW_GAIN, Agreement, judge
from flexquant.merge.kv.cache_layout import rotation_difference, scale_difference
from flexquant.merge.kv.effective_maps import LATENT, EffectiveMaps
from flexquant.merge.kv.residual_basis import ResidualBasis, compare_bases
from flexquant.merge.kv.sampling import row_numbers, sample_rows
from flexquant.merge.kv.scaled_rows import ScaledMatrix
from flexquant.merge.kv.sums import sum_products

VECTOR_TOLERANCE = 0.02
"""Relative error of biases and K norms: never quantised, so bfloat16 storage (2^-8), five times over."""
CACHED_NORMS = ("self_attn.k_norm", "self_attn.kv_a_layernorm")
"""Norms of K, and of what latent attention caches."""
KV_ADVICE = (
    "quantise both from the same 16-bit model without smoothing or rotating K and V "
    "(AWQ: no v_proj -> o_proj mapping; SpinQuant and QuIP: no rotation of attention heads)"
)
RESIDUAL_ADVICE = "use plans that run all layers in one variant, or quantise both without rotation"


@dataclass
class LayerComparison:
    """What was found in one layer, up to the first difference."""

    agreements: list[tuple[str, Agreement]] = field(default_factory=list)
    """By projection, in the order in which they were compared."""
    cache_difference: str = ""
    """Why the layer's K and V cannot be shared; empty when they can."""
    residual_difference: str = ""
    """Why the layer cannot run in either variant within one pass; empty when nothing was found against it."""


class Pair:
    """One variant against another. Layers are compared in several threads at a time."""

    def __init__(self, maps: EffectiveMaps, reference: EffectiveMaps) -> None:
        self.maps, self.reference = maps, reference
        self.names = f"variants '{reference.source.name}' and '{maps.source.name}'"
        self.basis: ResidualBasis
        self.residual_message = ""
        """Why their layers cannot be mixed; empty when nothing was found against it."""

    @property
    def mixable(self) -> bool:
        return not self.residual_message

    def cache_and_basis_difference(self, pool: Executor) -> str:
        """Compare K's rotations, K and V scales and the residual stream's basis; empty for no difference."""
        for find_difference in (rotation_difference, scale_difference):
            if difference := find_difference(self.maps, self.reference):
                return difference
        self.compare_bases(pool)
        if self.basis.related:
            return ""
        return (
            f"their token embeddings differ by {self.basis.rotated_error:.3g} even after the best rotation, "
            f"allowed {self.basis.allowed:.3g}, so they are not copies of one model"
        )

    def compare_bases(self, pool: Executor) -> None:
        self.basis = basis = compare_bases(self.maps, self.reference, pool)
        if not basis.same:
            self.forbid_mixing(
                f"their residual streams lie in different bases (embed_tokens differs by "
                f"{basis.direct_error:.3g}, allowed {basis.allowed:.3g}, and by {basis.rotated_error:.3g} "
                "after a rotation)"
            )

    def refusal(self, difference: str) -> str:
        return f"{self.names} cannot share a KV cache: {difference}; {KV_ADVICE}"

    def forbid_mixing(self, difference: str) -> None:
        self.residual_message = (
            f"{self.names} cannot be mixed layer by layer: {difference}; {RESIDUAL_ADVICE}"
        )

    def compare_layer(self, layer: int) -> LayerComparison:
        """Compare K and V, and, while nothing speaks against mixing, what goes to the residual stream."""
        found = LayerComparison()
        found.cache_difference = self._compare_kv(layer, found)
        if not found.cache_difference and self.mixable:
            found.residual_difference = self._compare_residual(layer, found)
        return found

    def compare_residual(self, layer: int) -> LayerComparison:
        """Compare what goes to the residual stream, while nothing speaks against mixing."""
        found = LayerComparison()
        if self.mixable:
            found.residual_difference = self._compare_residual(layer, found)
        return found

    def _compare_kv(self, layer: int, found: LayerComparison) -> str:
        cached = [m.cached(layer) for m in (self.maps, self.reference)]
        if cached[0].keys() != cached[1].keys():
            return f"layer {layer} caches {' and '.join(cached[0])}, or {' and '.join(cached[1])}"
        for projection in cached[0]:
            rows = [of[projection] for of in cached]
            if problem := _vector_problem(self.maps.bias(rows[0]), self.reference.bias(rows[1])):
                return f"layer {layer} {projection}.bias {problem}"
            a, b = self.maps.kv(layer, rows[0]), self.reference.kv(layer, rows[1])
            heads = None if projection == LATENT else self.reference.head_dim
            agreement = judge(sum_products(self._rotated(a), b), heads)
            found.agreements.append((projection, agreement))
            if not agreement.agrees:
                return _difference(f"layer {layer} {projection}", agreement)
        for norm in CACHED_NORMS:
            norms = [m.norm(layer, norm) for m in (self.maps, self.reference)]
            if problem := _vector_problem(*norms):
                return f"layer {layer} {norm} {problem}"
        if problem := _latent_up_problem(self.maps.latent_up(layer), self.reference.latent_up(layer)):
            return f"layer {layer} {problem}"
        return self._router_difference(layer)

    def _router_difference(self, layer: int) -> str:
        """Compare what gives tokens to experts: with another router, later layers have another K and V."""
        for module in self.reference.routers(layer):
            if module not in self.maps.routers(layer):
                return f"layer {layer} {module} is there in one variant only"
            of_variant, of_reference = (m.router(layer, module) for m in (self.maps, self.reference))
            agreement = judge(sum_products(self._rotated(of_variant), of_reference))
            if not agreement.agrees:
                return _difference(f"layer {layer} {module}, which chooses the experts,", agreement)
            for name in ("bias", "e_score_correction_bias"):
                vectors = [m.vector(layer, f"{module}.{name}") for m in (self.maps, self.reference)]
                if problem := _vector_problem(*vectors):
                    return f"layer {layer} {module}.{name} {problem}"
        return ""

    def _rotated(self, of_variant: ScaledMatrix) -> ScaledMatrix:
        """Return a map from the variant's residual stream as one from the reference's."""
        return of_variant if self.basis.rotation is None else of_variant.rotated(self.basis.rotation)

    def _compare_residual(self, layer: int, found: LayerComparison) -> str:
        """Compare o_proj and every down_proj, a sample of their rows."""
        modules = self.reference.output_modules(layer)
        if "self_attn.o_proj" not in modules or len(modules) < 2:
            return (
                f"layer {layer} has no 'self_attn.o_proj' or no 'down_proj' to compare (found "
                f"{', '.join(modules) or 'neither'})"
            )
        for module in modules:
            agreement = self._compare_output(layer, module)
            if not agreement.agrees and (gains := self._up_gains(layer, module)) is not None:
                agreement = self._compare_output(layer, module, gains)  # up_proj holds the rest
            found.agreements.append(("o_proj" if module == "self_attn.o_proj" else "down_proj", agreement))
            if not agreement.agrees:
                return _difference(f"layer {layer} {module}", agreement)
        return ""

    def _compare_output(
        self, layer: int, module: str, gains: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> Agreement:
        sample = self.reference.sample_of_output(layer, module)
        a, b = (m.output(layer, module, sample) for m in (self.maps, self.reference))
        if gains is not None:
            index, factors = gains
            a, b = a.take_columns(index).times_columns(factors), b.take_columns(index)
        return judge(sum_products(a, b), None, OUTPUT_NOISE_FACTOR, OUTPUT_ROW_GAIN, row_numbers(sample))

    def _up_gains(self, layer: int, module: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return rows of the up projection in front of a down projection, and the factor of each of them."""
        ups = [m.up_rows(layer, module) for m in (self.maps, self.reference)]
        if ups[0] is None or ups[1] is None:
            return None
        sample = sample_rows(ups[1].stop - ups[1].start, layer)
        a, b = self.maps.up(layer, ups[0], sample), self.reference.up(layer, ups[1], sample)
        return row_numbers(sample), sum_products(a, b).rows.gains().float()


def _difference(where: str, found: Agreement) -> str:
    overall = "" if found.worst == found.error else f"; {found.error}"
    return f"{where} differs by more than quantisation noise ({found.worst}{overall})"


def _latent_up_problem(a: Mapping[str, TensorRef], b: Mapping[str, TensorRef]) -> str:
    """Return how what expands a latent cache differs; empty when it is equal, or there is none."""
    if a.keys() == b.keys() and all(same_bytes(a[name], b[name]) for name in a):
        return ""
    return (
        "self_attn.kv_b_proj, which expands the cached latent for all variants at once, is not the same in "
        "both; keep it in 16 bits in all of them ('re:.*kv_b_proj$' among what the recipe ignores)"
    )


def _vector_problem(a: torch.Tensor | None, b: torch.Tensor | None) -> str:
    """Return how two vectors differ; empty when they agree or there are none."""
    if a is None or b is None:
        return "" if a is b else "is there in one variant only"
    error = float((a - b).norm() / b.norm().clamp_min(1e-30))
    return "" if error <= VECTOR_TOLERANCE else f"differs by {error:.3g}, allowed {VECTOR_TOLERANCE}"
