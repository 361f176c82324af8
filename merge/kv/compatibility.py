# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Decide whether variants can share one KV cache, and whether one plan can mix their layers.

A variant reads cache entries that another variant wrote, so every layer must compute the same K and V up to
quantisation noise. GPTQ, rounding to nearest and SmoothQuant's fold of a norm into q, k and v keep K and V.
Scaling K or V themselves (AWQ's v -> o smoothing) or rotating them (SpinQuant's R2 and R3) does not: each
such model is right on its own cache, and silently wrong on the other's.

What is compared. Each layer runs in transformers' own code for both variants, without its matrices
(`skeleton`): in their place both variants get the same outputs. Whatever runs (norms, biases, attention,
rotary embedding) has to cache and return the same numbers, but for the rounding of parameters (`all_else`).
The matrices are compared with one another (`layer_comparison`): they have to agree up to quantisation noise,
after factors between the two variants' inputs are multiplied out, so that a legitimate fold cancels.
Gradients tell which rows reach the cache. Cache scales and run-time rotations have to be equal
(`pair`), and so do the projection that expands the latent cache of multi-head latent attention and
tensors that no layer of transformers reads. Rotating the whole residual stream (QuaRot, SpinQuant's R1) keeps
K and V but changes their matrices: the rotation is found from the embeddings (`residual_basis`) and undone,
and layers are compared up to the cache only. Behind the layers, the final norm and the lm_head together have
to make the same logits (`head_comparison`).

States. Linear attention (gated delta net, Kimi's), state spaces (Mamba) and short convolutions carry a state
from token to token, and a variant reads what another wrote there. What a layer writes into transformers'
cache (`written_cache`) is compared like K and V, after more tokens: the state itself, and all inputs of a
convolution, the last of which are its state. Gradients tell the rows that reach it: those of q, k, v and the
gates of input and forgetting, not those of the gate behind the state. A projection or gate that one variant
alone quantises is noise like any other. A state that transformers does not keep in its cache is refused.

    Noise of matrices does not grow with the length, so its bounds are those of K and V. A head that keeps the
    share exp(-g) of its state from token to token, g = exp(A_log) softplus(a + dt_bias), forgets errors as it
    forgets tokens. If noise moves a by d, g is off by a share of at most d, as softplus' <= softplus; what
    was written n tokens ago is off by n g d, and weighs exp(-n g): at most d / e, whatever n is. The delta
    rule, I - b k k^T with |k| = 1, does not enlarge errors either. Measured on random layers of Qwen3-Next
    and Granite 4, INT8 against INT4 (their matrices are 0.10 apart): the state's relative error is 0.12 to
    0.20 after 12, 48, 192, 768 and 3072 tokens alike, for heads that forget at once or after a thousand.

    A parameter that the state is computed with (A_log, dt_bias, conv1d, norms inside) could add up unseen:
    in a head that forgets slowly, another A_log shows after thousands of tokens only. So each of its numbers
    may differ by the rounding of its dtype and no more. Gradients tell these parameters too; no method of
    quantising changes them.

What a difference forbids. These forbid a shared cache: a difference in a row that reaches the cache, in a
parameter, in a 16-bit matrix, or in a module outside of the layers; another matrix that differs by more than
quantisation ever explains (`ERROR_CAP`, `OF_ANOTHER`); and columns that are larger or smaller on the whole,
because the layers behind them then cache something else. A matrix that differs by more than noise, but by
less than that, forbids only plans that mix layers, and so does another residual basis. Every row that reaches
the cache is compared, and a sample of the other rows: `sampling` says which, and what the sample can miss.

The expected noise. Rounding to steps of width s has an error of variance s^2 / 12, so the scales predict how
far two variants are apart (`dequantize`): the root of the sum of both variances, relative to the reference's
norm. Measured errors, as multiples of that prediction: rounding to nearest 1.00 to 1.13 on SmolLM2-135M (0.62
to 1.03 on Gaussian, Student-t and outlier-heavy random weights); llmcompressor's GPTQ, which trades weight
error for output error, 1.35 to 1.73 (W4A16 g64 against SmoothQuant W8A8, K and V of all 30 layers). The
bounds, in `agreement`:

    relative error    4 times the prediction, which is 2.3 times what GPTQ needs; at most 0.8. Measured
                      0.12-0.20 under bounds of 0.32-0.55; rotations and other models have 1.41. Each KV head
                      is judged too. Other matrices: 6 times; GPTQ reaches 3.1 behind massive activations
                      (down_proj).
    gain of a row     an output channel's least-squares factor, within 10 %. Noise has no preferred sign
                      along a row: GPTQ reaches 5 %, while v -> o smoothing by 0.8-1.25 shows 20 %, though its
                      error (0.23) would pass as INT4 noise. Other matrices: 25 %; GPTQ reaches 9.6 %.
    gain of columns   the median over input channels, within 3 %; it shows a norm that was changed without its
                      projections (6 % for changes by 0.8-1.25) and stays below 0.6 % otherwise. The worst
                      column would not do: GPTQ legitimately moved one by 107 %, and scales of amax / 7.5 clip
                      an outlier channel by 7 %.
    other numbers     6 times the effect of rounding every parameter to its dtype, plus the effect of float32
                      arithmetic in another order.

Smoothing by less than 10 % passes: it changes K and V less than INT4 does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.module_names import decoder_layer
from flexquant.checkpoint.source import Source
from flexquant.errors import FlexQuantError
from flexquant.merge.kv.agreement import MatrixDistance
from flexquant.merge.kv.layer_comparison import LayerComparison
from flexquant.merge.kv.pair import Pair
from flexquant.merge.kv.skeleton import Skeleton
from flexquant.merge.kv.variant_weights import VariantWeights

LayerProgress = Callable[[int, int], object]
"""Called with (layers compared, layers to compare)."""
ALIKE = ("llama", "qwen3", "phi3")
"""transformers models that can stand in for a missing one: plain, with norms of Q and K, fused matrices."""
WITH_BIASES = {"attention_bias": True, "mlp_bias": True}
WEIGHT = re.compile(r"\.weight(_packed)?$")


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
    """Projection -> the comparison that came closest to its bound: variant, layer, error and bound."""

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

    def record(self, projection: str, variant: str, layer: int, found: MatrixDistance) -> None:
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


def check_kv_compatibility(sources: Sequence[Source], progress: LayerProgress | None = None) -> KVReport:
    """Decide whether variants can share one KV cache, and whether one plan can mix their layers.

    Reads every row that reaches the cache, and a sample of the others. Variants that cannot be mixed with
    the first are read again, to compare them with one another. Returns at the first layer that forbids
    sharing. Raises FlexQuantError for an architecture or a scheme that cannot be compared.
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
    """Record why sharing is refused, and count all other variants as rescaled."""
    report.message, report.rescaled = message, [source.name for source in sources[1:]]
    return report


def _note(report: KVReport, pair: Pair, layer: int, found: LayerComparison) -> None:
    """Add one layer's comparison to the report; called in the order of the layers."""
    for projection, agreement in found.agreements:
        report.record(projection, pair.variant.source.name, layer, agreement)
    difference = found.cache_difference or found.residual_difference
    if difference and pair.mixable:
        pair.forbid_mixing(difference)


@contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of as many threads as PyTorch uses; inside each, PyTorch computes on one thread.

    On leaving, tasks that have not begun are cancelled, and PyTorch's number of threads is restored.
    """
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def build_skeleton(source: Source) -> Skeleton:
    """Return the skeleton of a source's model.

    If transformers cannot build or run the model, the first model of ``ALIKE`` whose layers have the same
    matrices takes its place, marked ``stands_in``. Raises FlexQuantError if there is none.
    """
    try:
        return Skeleton(source.config)
    except Exception as e:  # the code of a model in transformers can raise anything
        reason = f"{type(e).__name__}: {e}"
    names = {
        WEIGHT.sub("", name[found.end() :])
        for name in source.tensors
        if (found := decoder_layer(name)) is not None and found["index"] == "0" and WEIGHT.search(name)
    }
    for kind in ALIKE:
        try:
            skeleton = Skeleton({**source.config, **WITH_BIASES, "model_type": kind}, stands_in=True)
        except Exception:  # as above
            continue
        if skeleton.matrices(0).keys() <= names:
            return skeleton
    raise FlexQuantError(
        f"transformers cannot build the {source.architecture} of variant '{source.name}' ({reason}), and its "
        f"layers are not those of {', '.join(ALIKE)} either, so its KV cache cannot be compared; update "
        "transformers"
    )
