# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""May variants share one KV cache, and may their layers be mixed in one plan?

A cache written by one variant is read by another, so every layer must compute the same K and V up to
quantisation noise. That holds for GPTQ, for rounding and for SmoothQuant's fold of a norm into q, k and v.
It does not hold once K or V themselves are scaled (AWQ's v -> o smoothing) or rotated (SpinQuant's R2 and
R3): each such model is right on its own, and silently wrong on the other's cache.

What is compared. Neither tensors nor outputs alone: transformers' own layers run for each variant, without
their matrices (`skeleton`), and the matrices are compared as such (`layer_comparison`). What runs, norms and
biases, attention and its rotary embedding, has to cache and return the same, number by number but for the
rounding of parameters (`all_else`), since both variants get the same answers in the place of their
matrices. A matrix has to be the same up to quantisation noise, once the factors of what it is given are
multiplied out, so that a legitimate fold cancels. Gradients tell which rows reach the cache. Cache scales and
rotations at run time are compared as they are (`cache_layout`); what expands the latents of multi-head latent
attention has to be equal, and so has what no layer of transformers reads. A checkpoint whose whole residual
stream is rotated (QuaRot, SpinQuant's R1) keeps K and V but not their matrices: the rotation is found from
the embeddings (`residual_basis`) and undone, and its layers are compared up to the cache, no further.

What forbids what. No cache is shared where a row that reaches it differs, or a parameter, or a matrix in 16
bits, or what all layers compute with. Nor is it shared where another matrix differs by more than quantising
ever does (`ERROR_CAP`, `OF_ANOTHER`), or where its columns are larger or smaller on the whole: the layers
behind it then cache something else. A matrix that differs by more than noise, but not by so much, forbids
layered plans only, as another residual basis does. Every row that reaches the cache is compared, and a sample
of the others: `sampling` says which, and what that can miss.

The yardstick. Rounding to steps of width s errs with variance s^2 / 12, so the scales alone say how far
two variants may be apart (`dequantize`): the root of both variances added, over the reference's norm.
Measured against that prediction, rounding to nearest errs by 1.00 to 1.13 of it on SmolLM2-135M (0.62 to
1.03 on Gaussian, Student-t and outlier-heavy random weights), and llmcompressor's GPTQ, which trades weight
error for output error, by 1.35 to 1.73 (W4A16 g64 against SmoothQuant W8A8, K and V of all 30 layers). The
bounds, in `agreement`:

    relative error    4 times the prediction, so 2.3 times what GPTQ needs; at most 0.8. Measured 0.12-0.20,
                      bound 0.32-0.55. Rotations and other models err by 1.41. Per KV head as well.
                      Other matrices: 6 times; GPTQ reaches 3.1 behind massive activations (down_proj).
    gain of a row     an output channel's least-squares factor, within 10 %. Noise has no preferred sign
                      along a row: GPTQ reaches 5 %, v -> o smoothing by 0.8-1.25 shows 20 %, though its
                      error (0.23) would pass as INT4 noise. Other matrices: 25 %; GPTQ reaches 9.6 %.
    gain of columns   the median over input channels, within 3 %: a norm that was changed without its
                      projections. Not the worst column: GPTQ moved one by 107 %, legitimately, and scales
                      of amax / 7.5 clip an outlier channel by 7 %. The median stays below 0.6 %, and shows
                      6 % for norms changed by 0.8-1.25.
    all else          6 times what rounding every parameter to its dtype does to that number, and float32
                      arithmetic in another order.

Smoothing by less than 10 % passes: it changes K and V less than INT4 does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.source import Source
from flexquant.merge.kv.agreement import Agreement
from flexquant.merge.kv.build_skeleton import build_skeleton
from flexquant.merge.kv.layer_comparison import LayerComparison
from flexquant.merge.kv.pair import Pair
from flexquant.merge.kv.variant_weights import VariantWeights
from flexquant.merge.kv.workers import workers

Progress = Callable[[int, int], object]
"""Called with (layers compared, layers in all)."""


@dataclass
class KVReport:
    """What the comparison found. The first source is the reference for all others."""

    message: str = ""
    """Why the variants cannot share a KV cache; empty when they can."""
    residual_messages: list[str] = field(default_factory=list)
    """Why layers of some variants cannot be mixed, a sentence for each pair compared; empty when all can."""
    mixable: list[list[str]] = field(default_factory=list)
    """Groups of variants whose layers can be mixed; a variant that was not compared is alone."""
    rescaled: list[str] = field(default_factory=list)
    """Variants of which a linear is scaled or turned against the first one's: no LoRA adapter fits both."""
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

    Reads once every row that reaches the cache, and a sample of the others; again those of variants that
    cannot be mixed with the first, to compare them with one another. Returns at the first layer that
    forbids sharing. Raises FlexQuantError for an architecture or a scheme that cannot be compared.
    """
    report = KVReport(mixable=[[source.name] for source in sources])
    if len(sources) < 2:
        return report
    with workers() as pool:
        skeleton = pool.submit(build_skeleton, sources[0]).result()
        reference = VariantWeights(sources[0], skeleton)
        layers = range(reference.num_layers)
        different_streams = [reference]
        layers_done, layers_in_all = 0, len(layers) * (len(sources) - 1)
        for source in sources[1:]:
            variant = VariantWeights(source, skeleton)
            pair = Pair(variant, reference, skeleton)
            if difference := pair.cache_and_basis_difference(pool):
                return _refuse(report, sources, pair.refusal(difference))
            for layer, found in enumerate(pool.map(pair.compare_layer, layers)):
                _note(report, pair, layer, found)
                if found.rescaled and source.name not in report.rescaled:
                    report.rescaled.append(source.name)
                if found.cache_difference:
                    return _refuse(report, sources, pair.refusal(found.cache_difference))
                layers_done += 1
                if progress is not None:
                    progress(layers_done, layers_in_all)
            for other in different_streams:
                if other is not reference:
                    pair = Pair(variant, other, skeleton)
                    pair.compare_bases(pool)
                    if pair.mixable:
                        for layer, found in enumerate(pool.map(pair.compare_layer, layers)):
                            _note(report, pair, layer, found)
                if pair.mixable:
                    report.join(source.name, other.source.name)
                    break
                report.residual_messages.append(pair.residual_message)
            else:
                different_streams.append(variant)
    return report


def _refuse(report: KVReport, sources: Sequence[Source], message: str) -> KVReport:
    """Write down why sharing is refused; what was not compared counts as rescaled."""
    report.message, report.rescaled = message, [source.name for source in sources[1:]]
    return report


def _note(report: KVReport, pair: Pair, layer: int, found: LayerComparison) -> None:
    """Write what was found in a layer into the report; layers come in order."""
    for projection, agreement in found.agreements:
        report.record(projection, pair.variant.source.name, layer, agreement)
    difference = found.cache_difference or found.residual_difference
    if difference and pair.mixable:
        pair.forbid_mixing(difference)
