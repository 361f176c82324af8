# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read from a model's config its heads, its layers with a KV cache, and the experts of a token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexquant.errors import FlexQuantError

KV_BYTES = 2
"""Bytes of one number in the KV cache: 16 bits, vLLM's default."""
WITHOUT_CACHE = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "mlp", "moe")
"""Kinds of layers, as configs of transformers name them, that keep no KV cache."""
ACTIVE_EXPERTS = ("num_experts_per_tok", "moe_topk", "top_k_experts")
"""Names of the number of experts that a token goes through; most config classes map theirs to the first."""


@dataclass(frozen=True)
class Heads:
    """The attention heads of a layer."""

    queries: int
    kv: int
    """Number of heads of keys and values."""
    size: int

    @classmethod
    def read(cls, config: object, devices: int, source: str | Path) -> Heads:
        """Read a layer's ``config``; raise FlexQuantError unless each device gets as many heads."""
        hidden, queries = (_integer(config, key, source) for key in ("hidden_size", "num_attention_heads"))
        kv = _integer(config, "num_key_value_heads", source, queries)
        few, many = sorted((kv, devices))
        if queries % devices or many % few:
            raise FlexQuantError(
                f"{source} has {queries} attention heads and {kv} KV heads, which {devices} devices cannot "
                "share evenly; give a --tensor-parallel-size that divides them"
            )
        return cls(queries, kv, _integer(config, "head_dim", source, hidden // queries))

    def repeated(self, devices: int) -> int:
        """Return by how much more keys and values a token has on all devices: each has a head at least."""
        return (max(1, devices // self.kv) - 1) * 2 * self.kv * self.size


@dataclass(frozen=True)
class Attention:
    """One device's share of a model's attention."""

    heads: list[Heads]
    """The heads of each decoder layer, on all devices together."""
    kv_bytes_per_token: float
    flops: float
    """Operations for one query token and one key token in all layers: scores and weighted sum."""

    @classmethod
    def read(cls, config: object, devices: int, source: str | Path) -> Attention:
        """Read what ``built_model.language_config`` returns; ``source`` names the model in messages.

        Sliding windows are counted as full attention, and states of layers without attention as nothing. A
        KV cache that several layers share is counted once. Raises FlexQuantError for a model without
        attention or with latent attention, and for heads that the ``devices`` cannot share.
        """
        num_layers = _integer(config, "num_hidden_layers", source)
        stated = (getattr(config, key, None) for key in ("layers_block_type", "layer_types"))
        kinds = next((kinds for kinds in stated if isinstance(kinds, list) and kinds), [None] * num_layers)
        with_cache = [layer for layer, kind in enumerate(kinds[:num_layers]) if kind not in WITHOUT_CACHE]
        if not with_cache or getattr(config, "kv_lora_rank", None):
            raise FlexQuantError(
                f"{source} has {'multi-head latent' if with_cache else 'no'} attention, and passes of such a "
                "model cannot be predicted; measure them with 'flexquant tune'"
            )
        # Few models have other heads in some layers.
        configs = getattr(config, "per_layer_config", None) or [config] * num_layers
        heads = [Heads.read(configs[number], devices, source) for number in range(num_layers)]
        # The last layers can read the KV cache of layers before them, as in Gemma 3n.
        shared = getattr(config, "num_kv_shared_layers", None)
        stored = with_cache[: len(with_cache) - (shared if isinstance(shared, int) else 0)]
        numbers = sum(2 * heads[n].kv * heads[n].size + heads[n].repeated(devices) for n in stored)
        queries = sum(heads[n].queries * heads[n].size for n in with_cache)
        return cls(heads, numbers * KV_BYTES / devices, queries * 4 / devices)


def active_experts(config: object, source: str | Path) -> int:
    """Return the experts that each token goes through; some models state them by layer, all alike."""
    found = (getattr(config, key, None) for key in ACTIVE_EXPERTS)
    stated = next((number for number in found if number is not None), None)
    each = stated if isinstance(stated, list) else [stated]
    if not each or any(type(number) is not int or number < 1 or number != each[0] for number in each):
        raise FlexQuantError(
            f"{source} has experts, and {' or '.join(ACTIVE_EXPERTS)} {stated!r} does not say how many of "
            "them every token goes through, so passes cannot be predicted; measure them with 'flexquant tune'"
        )
    number: int = each[0]
    return number


def _integer(config: object, key: str, source: str | Path, default: int | None = None) -> int:
    """Return a number of a config; ``default`` for None, if it is given."""
    value = getattr(config, key, None)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise FlexQuantError(
            f"{Path(source) / 'config.json'} has {key} {value!r}, expected a whole number from 1; correct "
            "it, or fetch it again"
        )
    return value
