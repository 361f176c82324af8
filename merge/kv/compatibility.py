# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Decide whether variants can share one KV cache, and whether one plan can mix their layers.

A variant reads cache entries that another one wrote, so every layer must compute the same K and V, or the
same state, up to quantisation noise. Folding a norm (SmoothQuant) keeps them; scaling (AWQ's v -> o
smoothing) or rotating K and V (SpinQuant's R2 and R3) does not.

These forbid a shared cache: a difference in a row that reaches the cache, a parameter, a 16-bit matrix or a
module outside of the layers; another matrix that differs by more than quantisation ever explains; columns
that are larger or smaller on the whole. A matrix that differs by more than noise, but less than that, forbids
only plans that mix layers, and so does another residual basis.
"""

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import torch

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.module_names import decoder_layer
from flexquant.checkpoint.safetensors_io import load_tensor
from flexquant.checkpoint.schemes import transforms_at
from flexquant.checkpoint.writer import Progress
from flexquant.errors import FlexQuantError, said_by
from flexquant.merge.formats import Source
from flexquant.merge.kv.layer_comparison import LayerComparison, RowsCached
from flexquant.merge.kv.outside_layers import ResidualBasis, compare_bases, logits_difference
from flexquant.merge.kv.skeleton import Skeleton
from flexquant.merge.kv.variant_weights import CACHE_SCALE, VariantWeights, unequal

KV_ADVICE = (
    "quantise both from the same 16-bit model without smoothing or rotating K and V "
    "(AWQ: no v_proj -> o_proj mapping; SpinQuant and QuIP: no rotation of attention heads)"
)
RESIDUAL_ADVICE = "use plans that run all layers in one variant, or quantise both without rotation"
CACHE_TRANSFORMS = ("k_cache", "q_attn", "output")
"""Locations (TransformLocation) of transforms that run with the model, but for those of linears' inputs."""
ALIKE = ("llama", "qwen3", "phi3")
"""transformers models that can stand in for a missing one: plain, with norms of Q and K, fused matrices."""
WITH_BIASES = {"attention_bias": True, "mlp_bias": True}
WEIGHT = re.compile(r"\.weight(_packed)?$")


class Pair:
    """A variant and the reference that it is compared with. Several threads compare layers at a time."""

    def __init__(self, variant: VariantWeights, reference: VariantWeights) -> None:
        self.variant, self.reference = variant, reference
        self.names = f"variants '{reference.source.name}' and '{variant.source.name}'"
        self.basis: ResidualBasis
        self._rows_cached: RowsCached = {}
        self.residual_message = ""
        """Why their layers cannot be mixed; empty if nothing was found against it."""

    def cache_and_basis_difference(self, pool: Executor) -> str:
        """Return the first difference in K's rotations, cache scales, modules outside the layers or basis."""
        for find_difference in (rotation_difference, scale_difference):
            if difference := find_difference(self.variant.source, self.reference.source):
                return difference
        before = self.reference.skeleton.before_layers
        for name in unequal(self.variant.outside(before), self.reference.outside(before)):
            return f"'{name}', which all layers compute with, is not equal in both"
        self.compare_bases(pool)
        difference = self.basis.difference
        if not difference or self.basis.rotation is not None:
            compared = (self.variant, self.reference, self.basis.rotation)
            difference = pool.submit(logits_difference, *compared).result()
        return f"{difference}, so they are not copies of one model" if difference else ""

    def compare_bases(self, pool: Executor) -> None:
        self.basis = compare_bases(self.variant, self.reference, pool)
        if self.basis.difference:
            self.forbid_mixing(f"their residual streams lie in different bases: {self.basis.difference}")

    def refusal(self, difference: str) -> str:
        return f"{self.names} cannot share a KV cache: {difference}; {KV_ADVICE}"

    def forbid_mixing(self, difference: str) -> None:
        problem = f"{self.names} cannot be mixed layer by layer: {difference}"
        self.residual_message = f"{problem}; {RESIDUAL_ADVICE}"

    def compare_layer(self, layer: int) -> LayerComparison:
        weights = (self.variant, self.reference)
        try:
            return LayerComparison(weights, layer, self.basis.rotation, self._rows_cached).run()
        except FlexQuantError:
            raise
        except Exception as e:  # the code of a model in transformers can raise anything
            said = f"{type(e).__name__}: {said_by(e)}"
            problem = f"layer {layer} of {self.names} cannot be run by transformers ({said})"
            raise FlexQuantError(f"{problem}, so its cache cannot be compared; update transformers") from e


def rotation_difference(variant: Source, reference: Source) -> str:
    """Return how the run-time rotations of K (SpinQuant's R3), or of outputs, differ; empty if not."""
    a, b = (transforms_at(of.quantization_config, CACHE_TRANSFORMS) for of in (variant, reference))
    names = reference.name, variant.name
    return "" if a == b else f"rotation of the KV cache is {b!r} in '{names[0]}' and {a!r} in '{names[1]}'"


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


@dataclass
class KVReport:
    """Result of the comparison. The first source is the reference for all others."""

    message: str = ""
    """Why the variants cannot share a KV cache; empty if they can."""
    residual_messages: list[str] = field(default_factory=list)
    """Why layers of some variants cannot be mixed, a sentence for each pair compared; empty if all can."""
    mixable: list[list[str]] = field(default_factory=list)
    """Groups of variants whose layers can be mixed; a variant that was not compared is alone in its group."""
    rescaled: list[str] = field(default_factory=list)
    """Variants with a linear that is scaled or rotated against the first variant's: no LoRA fits both."""
    worst: dict[str, JsonObject] = field(default_factory=dict)
    """Name of a projection -> the comparison of its matrices that came closest to its bound."""

    @property
    def compatible(self) -> bool:
        return not self.message

    @property
    def layered_plans(self) -> bool:
        return self.compatible and len(self.mixable) == 1

    def refuse(self, sources: Sequence[Source], message: str) -> Self:
        """Record why sharing is refused, count all other variants as rescaled, and return self."""
        self.message, self.rescaled = message, [source.name for source in sources[1:]]
        return self

    def to_json(self) -> JsonObject:
        return {
            "compatible": self.compatible,
            "layered_plans": self.layered_plans,
            "message": self.message,
            "residual_message": " ".join(self.residual_messages),
            "worst": self.worst,
        }

    def note(self, pair: Pair, layer: int, found: LayerComparison) -> None:
        """Add one layer's comparison; called in the order of the layers."""
        for projection, agreement in found.agreements:
            entry = {
                "variant": pair.variant.source.name,
                "layer": layer,
                "relative_error": round(agreement.error.measured, 5),
                "allowed": round(agreement.error.allowed, 5),
                "nearest_bound": str(agreement.worst),
                "share_of_bound": round(agreement.worst.ratio, 4),
            }
            if entry["share_of_bound"] >= self.worst.get(projection, entry)["share_of_bound"]:
                self.worst[projection] = entry
        difference = found.cache_difference or found.residual_difference
        if difference and not pair.residual_message:
            pair.forbid_mixing(difference)


def check_kv_compatibility(sources: Sequence[Source], progress: Progress | None = None) -> KVReport:
    """Decide whether variants can share one KV cache, and whether one plan can mix their layers.

    Reads every row that reaches the cache, and a sample of the others. Variants that cannot be mixed with
    the first are read again, to compare them with one another. ``progress`` is called with the layers
    compared and those to compare. Returns at the first layer that forbids sharing. Raises FlexQuantError for
    an architecture or a scheme that cannot be compared.
    """
    report = KVReport(mixable=[[source.name] for source in sources])
    if len(sources) < 2:
        return report
    with workers() as pool:
        skeleton = pool.submit(build_skeleton, sources[0]).result()
        reference = VariantWeights(sources[0], skeleton)
        layers = range(reference.num_layers)
        streams = [reference]
        layers_done, layers_in_all = 0, len(layers) * (len(sources) - 1)
        for source in sources[1:]:
            variant = VariantWeights(source, skeleton)
            pair = Pair(variant, reference)
            if difference := pair.cache_and_basis_difference(pool):
                return report.refuse(sources, pair.refusal(difference))
            for layer, found in enumerate(pool.map(pair.compare_layer, layers)):
                report.note(pair, layer, found)
                if found.rescaled and source.name not in report.rescaled:
                    report.rescaled.append(source.name)
                if found.cache_difference:
                    return report.refuse(sources, pair.refusal(found.cache_difference))
                layers_done += 1
                if progress is not None:
                    progress(layers_done, layers_in_all)
            for other in streams:
                if other is not reference:
                    pair = Pair(variant, other)
                    pair.compare_bases(pool)
                    compared = range(0) if pair.residual_message else layers
                    for layer, found in enumerate(pool.map(pair.compare_layer, compared)):
                        report.note(pair, layer, found)
                if not pair.residual_message:
                    report.mixable.remove([source.name])
                    next(group for group in report.mixable if other.source.name in group).append(source.name)
                    break
                report.residual_messages.append(pair.residual_message)
            else:
                streams.append(variant)
    return report


@contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """Yield as many threads as PyTorch uses, each on one core; cancel waiting tasks in the end."""
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def build_skeleton(source: Source) -> Skeleton:
    """Return the skeleton of a source's model, or of one in ``ALIKE``; raise FlexQuantError for neither."""
    try:
        return Skeleton(source.config)
    except Exception as e:  # the code of a model in transformers can raise anything
        reason = f"{type(e).__name__}: {said_by(e)}"
    weights = [(name, decoder_layer(name)) for name in source.tensors if WEIGHT.search(name)]
    names = {WEIGHT.sub("", name[at.end() :]) for name, at in weights if at and at["index"] == "0"}
    for kind in ALIKE:
        try:
            skeleton = Skeleton({**source.config, **WITH_BIASES, "model_type": kind}, stands_in=True)
        except Exception:  # as above
            continue
        if skeleton.matrices[0].keys() <= names:
            return skeleton
    problem = f"transformers cannot build the {source.architecture} of variant '{source.name}' ({reason})"
    other = f"and its layers are not those of {', '.join(ALIKE)} either, so its KV cache cannot be compared"
    raise FlexQuantError(f"{problem}, {other}; update transformers")
