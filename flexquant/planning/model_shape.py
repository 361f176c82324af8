# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read what the cost model needs of a merged checkpoint (linears, KV cache, bytes), without its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from flexquant.checkpoint.contents import report_checkpoint
from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
from flexquant.checkpoint.model_config import JsonObject, count_layers, text_config
from flexquant.errors import FlexQuantError
from flexquant.planning.device import MARLIN
from flexquant.planning.linears import INT4, Linear, LinearReader
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
    config = text_config(checkpoint.config)
    hidden, vocabulary = (_integer(config, key, folder) for key in ("hidden_size", "vocab_size"))
    report = report_checkpoint(checkpoint.merged, count_layers(config), checkpoint.tensors)
    linears = {name: reader.decoder_linears(active_experts(config)) for name, reader in readers.items()}
    head = next(iter(readers.values())).head(vocabulary, hidden)
    own_bytes = {name: found.own_bytes for name, found in report.variants.items()}
    shared = report.shared_bytes
    return device_share(config, linears, head, own_bytes, shared, tensor_parallel_size, derived or {}, folder)


def device_share(
    config: JsonObject,
    linears: Mapping[str, Mapping[Linear, int]],
    head: Linear,
    own_bytes: Mapping[str, float],
    shared_bytes: float,
    tensor_parallel_size: int,
    derived: Mapping[str, Derivation],
    source: str | Path,
) -> ModelShape:
    """Return one device's share of a model; ``linears`` and ``own_bytes`` are the whole model's, by variant.

    ``derived`` are variants that a policy derives from these. ``source`` names the model in messages. Sliding
    windows are counted as full attention. Raises FlexQuantError for latent attention, attention heads that
    ``tensor_parallel_size`` does not divide, and a derivation without INT4 weights.
    """
    hidden, heads = (_integer(config, key, source) for key in ("hidden_size", "num_attention_heads"))
    if heads % tensor_parallel_size:
        raise FlexQuantError(
            f"{source} has {heads} attention heads, which {tensor_parallel_size} devices cannot share "
            "evenly; give a --tensor-parallel-size that divides them"
        )
    if config.get("kv_lora_rank"):
        raise FlexQuantError(
            f"{source} has multi-head latent attention, whose passes cannot be predicted; measure them with "
            "'flexquant tune'"
        )
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = max(1, (config.get("num_key_value_heads") or heads) / tensor_parallel_size)
    num_layers = count_layers(config)
    model = ModelShape(
        num_layers,
        num_layers * 2 * kv_heads * head_dim * KV_BYTES,
        num_layers * 4 * heads * head_dim / tensor_parallel_size,
        {
            name: {linear.share(tensor_parallel_size): count for linear, count in counts.items()}
            for name, counts in linears.items()
        },
        head.share(tensor_parallel_size),
        {name: nbytes / tensor_parallel_size for name, nbytes in own_bytes.items()},
        shared_bytes / tensor_parallel_size,
        tensor_parallel_size,
        _has_sliding_window(config),
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


def active_experts(config: JsonObject) -> int:
    """Return the experts that each token goes through, as a config states them."""
    return config.get("num_experts_per_tok") or 1


def _has_sliding_window(config: JsonObject) -> bool:
    """Return as transformers does: by ``layer_types``, else by ``sliding_window`` unless it is off."""
    if layer_types := config.get("layer_types"):
        return "sliding_attention" in layer_types
    return bool(config.get("sliding_window")) and config.get("use_sliding_window") is not False


def _integer(config: JsonObject, key: str, folder: str | Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise FlexQuantError(
            f"{Path(folder) / 'config.json'} has {key} {value!r}, expected a whole number from 1; merge again"
        )
    return value
