# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read what the cost model needs of a merged checkpoint (linears, KV cache, bytes), without its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from types import SimpleNamespace

from flexquant.checkpoint.built_model import known_config
from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
from flexquant.checkpoint.model_config import count_layers, text_config
from flexquant.checkpoint.module_names import layer_number
from flexquant.checkpoint.weight_bytes import report_checkpoint
from flexquant.errors import FlexQuantError
from flexquant.planning.config_numbers import (
    active_experts,
    has_sliding_window,
    heads_by_layer,
    integer,
    layers_with_cache,
    layers_without_own,
)
from flexquant.planning.device import MARLIN
from flexquant.planning.linears import INT4, QKV, Linear, LinearReader
from flexquant.policy.rules import Derivation

KV_BYTES = 2
"""Bytes of one number in the KV cache: 16 bits, vLLM's default."""


@dataclass(frozen=True)
class ModelShape:
    """One device's share of a merged checkpoint."""

    num_layers: int
    kv_bytes_per_token: float
    attention_flops: float
    """Operations for one query token and one key token in all layers: scores and weighted sum."""
    linears: Mapping[str, Mapping[Linear, int]]
    """Variant -> linear of the decoder layers -> calls in a pass."""
    head: Linear
    """lm_head."""
    own_bytes: Mapping[str, float]
    """Variant -> bytes of the tensors that no other variant has."""
    shared_bytes: float
    tensor_parallel_size: int
    has_sliding_window: bool
    """Whether some layers attend to the latest tokens only; they are counted as full attention."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Variant that computes its weights in each pass -> variant whose weights it reads."""

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(self.linears)

    @property
    def resident_bytes(self) -> float:
        """Bytes of all variants' weights; shared tensors count once."""
        return self.bytes_of(self.variants)

    def bytes_of(self, variants: Iterable[str]) -> float:
        """Return the bytes of the weights if only these variants, and their sources, are loaded."""
        loaded = {name for variant in variants for name in (variant, self.sources.get(variant, variant))}
        return self.shared_bytes + sum(self.own_bytes[variant] for variant in loaded)


def read_model_shape(
    folder: str | Path, tensor_parallel_size: int = 1, derived: Mapping[str, Derivation] | None = None
) -> ModelShape:
    """Read config.json and the safetensors headers of the merged checkpoint in ``folder``.

    Arguments and further errors are those of :func:`device_share`. Raises FlexQuantError for a folder that is
    no merged checkpoint.
    """
    checkpoint = MergedCheckpoint.open(folder, published=True)
    readers = {
        name: LinearReader(
            checkpoint.variant_tensors(name), variant.quantization_config, f"{folder}, variant {name}"
        )
        for name, variant in checkpoint.merged.variants.items()
    }
    known = known_config(checkpoint.config, str(folder))
    config = SimpleNamespace(**text_config(checkpoint.config)) if known is None else known.get_text_config()
    hidden, vocabulary = (integer(config, key, folder) for key in ("hidden_size", "vocab_size"))
    report = report_checkpoint(checkpoint.merged, count_layers(checkpoint.config), checkpoint.tensors)
    linears = {name: reader.decoder_linears() for name, reader in readers.items()}
    head = next(iter(readers.values())).head(vocabulary, hidden)
    own_bytes = {name: found.own_bytes for name, found in report.variants.items()}
    shared = report.shared_bytes
    return device_share(config, linears, head, own_bytes, shared, tensor_parallel_size, derived or {}, folder)


def device_share(
    config: object,
    linears: Mapping[str, Mapping[str, Linear]],
    head: Linear,
    own_bytes: Mapping[str, float],
    shared_bytes: float,
    tensor_parallel_size: int,
    derived: Mapping[str, Derivation],
    source: str | Path,
) -> ModelShape:
    """Return one device's share of a model; the rest describes the whole model.

    ``config`` has transformers' attributes of a text model. ``linears`` are by variant and name, as vLLM
    fuses them. Bytes are divided evenly. ``derived`` are variants that a policy derives from these.
    ``source`` names the model in messages. Sliding windows are counted as full attention, and states of
    layers without attention as nothing. A KV cache that several layers share is counted once.

    Raises FlexQuantError for a model without attention or with latent attention, for heads and linears that
    ``tensor_parallel_size`` devices cannot share, for experts if the config does not say how many a token
    goes through, and for a derivation without INT4 weights.
    """
    num_layers = integer(config, "num_hidden_layers", source)
    with_cache = layers_with_cache(config, num_layers)
    if not with_cache or getattr(config, "kv_lora_rank", None):
        raise FlexQuantError(
            f"{source} has {'multi-head latent' if with_cache else 'no'} attention, and passes of such a "
            "model cannot be predicted; measure them with 'flexquant tune'"
        )
    heads = heads_by_layer(config, num_layers, source)
    for one in heads:
        one.check_shared(tensor_parallel_size, source)

    def part(name: str, linear: Linear) -> Linear:
        if linear.experts > 1:
            linear = replace(linear, active_experts=min(active_experts(config, source), linear.experts))
        if name.endswith(tuple(QKV)):
            own = heads[(layer_number(name) or 0) % num_layers]
            linear = linear.with_outputs(linear.outputs + own.repeated(tensor_parallel_size))
        return linear.share(name, tensor_parallel_size)

    stored = with_cache[: len(with_cache) - layers_without_own(config)]
    numbers = sum(2 * heads[n].kv * heads[n].size + heads[n].repeated(tensor_parallel_size) for n in stored)
    queries = sum(heads[n].queries * heads[n].size for n in with_cache)
    model = ModelShape(
        num_layers,
        numbers * KV_BYTES / tensor_parallel_size,
        queries * 4 / tensor_parallel_size,
        {
            variant: Counter(part(name, linear) for name, linear in by_name.items())
            for variant, by_name in linears.items()
        },
        head.with_outputs(ceil(head.outputs / tensor_parallel_size)),
        {name: nbytes / tensor_parallel_size for name, nbytes in own_bytes.items()},
        shared_bytes / tensor_parallel_size,
        tensor_parallel_size,
        has_sliding_window(config),
    )
    for name, derivation in derived.items():
        model = _with_derived(model, name, derivation, source)
    return model


def _with_derived(model: ModelShape, name: str, derivation: Derivation, source: str | Path) -> ModelShape:
    """Return the model with a variant that is derived from INT4 weights.

    W4A8 has a second copy of them. One copy computes INT8 weights from them in each pass, into memory for the
    largest linear, has Marlin run their passes in INT4, and leaves experts as they are.
    """
    stored = {} if name in model.linears else model.linears.get(derivation.source, {})
    if all(linear.scheme not in INT4 for linear in stored):
        raise FlexQuantError(
            f"{source} has the variants {', '.join(model.linears)}: there is no '{derivation.source}' with "
            f"INT4 weights to derive '{name}' from, or '{name}' is there already; take it out of the policy"
        )
    linears: Counter[Linear] = Counter()
    for linear, count in stored.items():
        linears[linear.derived(derivation)] += count
    own, sources = {name: model.own_bytes[derivation.source]}, {}
    if derivation.is_one_copy:
        own[name] = max(linear.weight_bytes for linear in linears if linear.source_bytes)
        sources[name] = derivation.source
        stored = {replace(x, scheme=MARLIN) if x.scheme in INT4 else x: n for x, n in stored.items()}
    own, sources = {**model.own_bytes, **own}, {**model.sources, **sources}
    of_variants = {**model.linears, derivation.source: stored, name: linears}
    return replace(model, linears=of_variants, own_bytes=own, sources=sources)
