# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""May variants share one KV cache, and may their layers be mixed in one plan?

A cache written by one variant is read by another, so every layer must compute the same K and V up to
quantisation noise. That holds for GPTQ, for rounding and for SmoothQuant's fold of a norm into q, k and v.
It does not hold once K or V themselves are scaled (AWQ's v -> o smoothing) or rotated (SpinQuant's R2 and
R3): each such model is right on its own, and silently wrong on the other's cache.

What is compared. Neither tensors nor outputs, but effective maps (`effective_maps`): the dequantised
k_proj and v_proj times the input norm in front of them, so that a legitimate fold cancels; biases and K
norms as they are; cache scales and rotations at run time (`cache_layout`). A checkpoint whose whole residual
stream is rotated (QuaRot, SpinQuant's R1) keeps K and V but not their matrices: the rotation is found from
the embeddings (`residual_basis`) and undone. Mixing layers asks for more, the same residual stream:
embeddings, o_proj and down_proj are compared too, and a difference there only forbids layered plans.

The yardstick. Rounding to steps of width s errs with variance s^2 / 12, so the scales alone say how far
two variants may be apart (`dequantize`): the root of both variances added, over the reference's norm.
Measured against that prediction, rounding to nearest errs by 1.00 to 1.13 of it on SmolLM2-135M (0.62 to
1.03 on Gaussian, Student-t and outlier-heavy random weights), and llmcompressor's GPTQ, which trades weight
error for output error, by 1.35 to 1.73 (W4A16 g64 against SmoothQuant W8A8, K and V of all 30 layers). The
bounds, in `agreement`:

    relative error    4 times the prediction, so 2.3 times what GPTQ needs; at most 0.8. Measured 0.12-0.20,
                      bound 0.32-0.55. Rotations and other models err by 1.41. Per KV head as well.
                      o_proj and down_proj: 6 times; GPTQ reaches 3.1 behind massive activations.
    gain of a row     an output channel's least-squares factor, within 10 %. Noise has no preferred sign
                      along a row: GPTQ reaches 5 %, v -> o smoothing by 0.8-1.25 shows 20 %, though its
                      error (0.23) would pass as INT4 noise. o_proj and down_proj: 25 %; GPTQ reaches 9.6 %.
    gain of columns   the median over input channels, within 3 %: a norm that was changed without its
                      projections. Not the worst column: GPTQ moved one by 107 %, legitimately, and scales
                      of amax / 7.5 clip an outlier channel by 7 %. The median stays below 0.6 %, and shows
                      6 % for norms changed by 0.8-1.25.
    biases, K norms   2 %: never quantised, stored in bfloat16 (0.4 %).

Smoothing by less than 10 % passes: it changes K and V less than INT4 does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.source import Source
from flexquant.merge.kv.agreement import OUTPUT_NOISE_FACTOR, OUTPUT_ROW_GAIN, Agreement, Comparison
from flexquant.merge.kv.cache_layout import rotation_difference, scale_difference
from flexquant.merge.kv.dequantize import Dequantized
from flexquant.merge.kv.effective_maps import EffectiveMaps
from flexquant.merge.kv.norms import Norms
from flexquant.merge.kv.residual_basis import ResidualBasis, compare_bases

Progress = Callable[[int, int], object]
"""Called with (layers compared, layers in all)."""

VECTOR_TOLERANCE = 0.02
"""Relative error of biases and K norms: never quantised, so bfloat16 storage (2^-8), five times over."""
KV_ADVICE = (
    "quantise both from the same 16-bit model without smoothing or rotating K and V "
    "(AWQ: no v_proj -> o_proj mapping; SpinQuant and QuIP: no rotation of attention heads)"
)
RESIDUAL_ADVICE = "use plans that run all layers in one variant, or quantise both without rotation"


@dataclass
class KVReport:
    """What the comparison found. The first source is the reference for all others."""

    message: str = ""
    """Why the variants cannot share a KV cache; empty when they can."""
    residual_messages: list[str] = field(default_factory=list)
    """Why layers of some variants cannot be mixed, a sentence for each pair compared; empty when all can."""
    mixable: list[list[str]] = field(default_factory=list)
    """Groups of variants whose layers can be mixed; a variant that was not compared is alone."""
    worst: dict[str, JsonObject] = field(default_factory=dict)
    """Projection -> where its statistic came closest to its bound: variant, layer, errors and bounds."""

    @property
    def compatible(self) -> bool:
        return not self.message

    @property
    def layered_plans(self) -> bool:
        """Whether layers of all variants can be mixed."""
        return self.compatible and len(self.mixable) == 1

    def join(self, variant: str, other: str) -> None:
        """Put a variant that was alone into the group of another."""
        self.mixable.remove([variant])
        next(group for group in self.mixable if other in group).append(variant)

    def to_json(self) -> JsonObject:
        return {
            "compatible": self.compatible,
            "layered_plans": self.layered_plans,
            "message": self.message,
            "residual_message": " ".join(self.residual_messages),
            "worst": self.worst,
        }

    def record(self, projection: str, variant: str, layer: int, found: Agreement) -> None:
        entry = {
            "variant": variant,
            "layer": layer,
            "relative_error": round(found.error.measured, 5),
            "allowed": round(found.error.allowed, 5),
            "nearest_bound": str(found.worst),
            "share_of_bound": round(found.worst.ratio, 4),
        }
        if entry["share_of_bound"] >= self.worst.get(projection, {}).get("share_of_bound", 0.0):
            self.worst[projection] = entry


def check_kv_compatibility(sources: Sequence[Source], progress: Progress | None = None) -> KVReport:
    """Say whether variants may share one KV cache, and whether their layers may be mixed in one plan.

    Reads every k, v, o and down projection once, up_proj where down_proj differs, and o and down again to
    compare those variants with one another that cannot be mixed with the first. Returns at the first
    projection that forbids sharing. Raises FlexQuantError for an architecture or a scheme that cannot be
    compared.
    """
    report = KVReport(mixable=[[source.name] for source in sources])
    if len(sources) < 2:
        return report
    norms = Norms(sources)
    reference = EffectiveMaps(sources[0], norms)
    different_streams = [reference]
    layers_done, layers_in_all = 0, reference.num_layers * (len(sources) - 1)
    for source in sources[1:]:
        maps = EffectiveMaps(source, norms)
        pair = _Pair(maps, reference, report)
        if not pair.same_cache_and_basis():
            return report
        for layer in range(reference.num_layers):
            if not pair.same_kv(layer):
                return report
            if pair.mixable:
                pair.compare_residual(layer)
            layers_done += 1
            if progress is not None:
                progress(layers_done, layers_in_all)
        for other in different_streams:
            if other is not reference:
                pair = _Pair(maps, other, report)
                pair.compare_residual_streams()
            if pair.mixable:
                report.join(source.name, other.source.name)
                break
            report.residual_messages.append(pair.residual_message)
        else:
            different_streams.append(maps)
    return report


class _Pair:
    """One variant against another; writes what it finds about the KV cache into the report."""

    def __init__(self, maps: EffectiveMaps, reference: EffectiveMaps, report: KVReport) -> None:
        self.maps, self.reference, self.report = maps, reference, report
        self.name = maps.source.name
        self.names = f"variants '{reference.source.name}' and '{self.name}'"
        self.basis: ResidualBasis
        self.residual_message = ""
        """Why their layers cannot be mixed; empty when nothing was found against it."""

    @property
    def mixable(self) -> bool:
        return not self.residual_message

    def same_cache_and_basis(self) -> bool:
        """Compare K's rotations, K and V scales and the residual stream's basis."""
        for find_difference in (rotation_difference, scale_difference):
            if difference := find_difference(self.maps, self.reference):
                return self._refuse(difference)
        self.compare_bases()
        if self.basis.related:
            return True
        return self._refuse(
            f"their token embeddings differ by {self.basis.rotated_error:.3g} even after the best rotation, "
            f"allowed {self.basis.allowed:.3g}, so they are not copies of one model"
        )

    def compare_residual_streams(self) -> None:
        """Compare the bases of two residual streams, and what every layer writes to them."""
        self.compare_bases()
        for layer in range(self.reference.num_layers):
            if self.mixable:
                self.compare_residual(layer)

    def compare_bases(self) -> None:
        self.basis = basis = compare_bases(self.maps, self.reference)
        if not basis.same:
            self._forbid_mixing(
                f"their residual streams lie in different bases (embed_tokens differs by "
                f"{basis.direct_error:.3g}, allowed {basis.allowed:.3g}, and by {basis.rotated_error:.3g} "
                "after a rotation)"
            )

    def same_kv(self, layer: int) -> bool:
        for projection in ("k_proj", "v_proj"):
            biases = [m.bias(layer, projection) for m in (self.maps, self.reference)]
            if problem := _vector_problem(*biases):
                return self._refuse(f"layer {layer} {projection}.bias {problem}")
            if not self._same_projection(layer, projection):
                return False
        norms = [m.norm(layer, "self_attn.k_norm") for m in (self.maps, self.reference)]
        if problem := _vector_problem(*norms):
            return self._refuse(f"layer {layer} self_attn.k_norm {problem}")
        return True

    def compare_residual(self, layer: int) -> None:
        """Compare what the layer writes to the residual stream: o_proj, and every down_proj."""
        modules = self.reference.output_modules(layer)
        if "self_attn.o_proj" not in modules or len(modules) < 2:
            self._forbid_mixing(
                f"layer {layer} has no 'self_attn.o_proj' or no 'down_proj' to compare (found "
                f"{', '.join(modules) or 'neither'})"
            )
            return
        for module in modules:
            found = self._compare_output(layer, module)
            if not found.agrees:  # up_proj may hold the rest
                found = self._compare_output(layer, module, self._up_gains(layer, module))
            projection = "o_proj" if module == "self_attn.o_proj" else "down_proj"
            self.report.record(projection, self.name, layer, found)
            if not found.agrees:
                self._forbid_mixing(_difference(f"layer {layer} {module}", found))
                return

    def _compare_output(self, layer: int, module: str, columns: torch.Tensor | None = None) -> Agreement:
        return _compare(
            self.maps.output_chunks(layer, module, columns),
            self.reference.output_chunks(layer, module, None),
            Comparison(noise_factor=OUTPUT_NOISE_FACTOR, row_gain=OUTPUT_ROW_GAIN),
        ).result()

    def _up_gains(self, layer: int, module: str) -> torch.Tensor | None:
        """Return the factor of every row of the up projection in front of a down projection."""
        ups = [m.up_chunks(layer, module) for m in (self.maps, self.reference)]
        if ups[0] is None or ups[1] is None:
            return None
        return _compare(ups[0], ups[1], Comparison()).row_gains()

    def _same_projection(self, layer: int, projection: str) -> bool:
        found = _compare(
            self._in_reference_basis(self.maps.kv_chunks(layer, projection)),
            self.reference.kv_chunks(layer, projection),
            Comparison(self.reference.head_dim),
        ).result()
        self.report.record(projection, self.name, layer, found)
        return found.agrees or self._refuse(_difference(f"layer {layer} {projection}", found))

    def _in_reference_basis(self, chunks: Iterable[Dequantized]) -> Iterable[Dequantized]:
        rotation = self.basis.rotation
        for chunk in chunks:
            if rotation is None:
                yield chunk
            else:  # the rotation spreads a row's noise over all its columns
                variance = chunk.variance.expand_as(chunk.weight).mean(dim=1, keepdim=True)
                yield Dequantized(chunk.weight @ rotation.T, variance)

    def _refuse(self, difference: str) -> bool:
        self.report.message = f"{self.names} cannot share a KV cache: {difference}; {KV_ADVICE}"
        return False

    def _forbid_mixing(self, difference: str) -> None:
        self.residual_message = (
            f"{self.names} cannot be mixed layer by layer: {difference}; {RESIDUAL_ADVICE}"
        )


def _compare(
    a_chunks: Iterable[Dequantized], b_chunks: Iterable[Dequantized], comparison: Comparison
) -> Comparison:
    for a, b in zip(a_chunks, b_chunks, strict=True):
        comparison.add(a.weight, a.variance, b.weight, b.variance)
    return comparison


def _difference(where: str, found: Agreement) -> str:
    overall = "" if found.worst == found.error else f"; {found.error}"
    return f"{where} differs by more than quantisation noise ({found.worst}{overall})"


def _vector_problem(a: torch.Tensor | None, b: torch.Tensor | None) -> str:
    """Return how two vectors differ; empty when they agree or there are none."""
    if a is None or b is None:
        return "" if a is b else "is there in one variant only"
    error = float((a - b).norm() / b.norm().clamp_min(1e-30))
    return "" if error <= VECTOR_TOLERANCE else f"differs by {error:.3g}, allowed {VECTOR_TOLERANCE}"
