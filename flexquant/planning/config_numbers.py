# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read from a model's config what the cost model needs: its heads, its layers with a KV cache, its experts.

A config is an object with transformers' attributes of a text model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexquant.errors import FlexQuantError

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
    def read(cls, config: object, source: str | Path) -> Heads:
        """Read a layer's ``config``; raise FlexQuantError, which names ``source``, for an absurd number."""
        hidden, queries = (integer(config, key, source) for key in ("hidden_size", "num_attention_heads"))
        kv = integer(config, "num_key_value_heads", source, queries)
        return cls(queries, kv, integer(config, "head_dim", source, hidden // queries))

    def check_shared(self, devices: int, source: str | Path) -> None:
        """Raise FlexQuantError, which names ``source``, unless each device gets as many heads."""
        few, many = sorted((self.kv, devices))
        if self.queries % devices or many % few:
            raise FlexQuantError(
                f"{source} has {self.queries} attention heads and {self.kv} KV heads, which {devices} "
                "devices cannot share evenly; give a --tensor-parallel-size that divides them"
            )

    def repeated(self, devices: int) -> int:
        """Return by how much more keys and values a token has on all devices: each has a head at least."""
        return (max(1, devices // self.kv) - 1) * 2 * self.kv * self.size


def heads_by_layer(config: object, num_layers: int, source: str | Path) -> list[Heads]:
    """Return the heads of each layer, as :meth:`Heads.read` does; few models have others in some layers."""
    layers = getattr(config, "per_layer_config", None) or [config] * num_layers
    return [Heads.read(layers[number], source) for number in range(num_layers)]


def layers_with_cache(config: object, num_layers: int) -> list[int]:
    """Return the numbers of the layers that read a KV cache."""
    kinds = _kinds(config) or [None] * num_layers
    return [layer for layer, kind in enumerate(kinds[:num_layers]) if kind not in WITHOUT_CACHE]


def layers_without_own(config: object) -> int:
    """Return how many of the last layers read the KV cache of layers before them, as in Gemma 3n."""
    number = getattr(config, "num_kv_shared_layers", None)
    return number if isinstance(number, int) else 0


def has_sliding_window(config: object) -> bool:
    """Return as transformers does: by ``layer_types``, else by ``sliding_window`` unless it is off."""
    if kinds := _kinds(config):
        return "sliding_attention" in kinds
    return (
        bool(getattr(config, "sliding_window", 0)) and getattr(config, "use_sliding_window", 1) is not False
    )


def _kinds(config: object) -> list[object]:
    """Return the kind of each layer; empty for a model whose layers are all alike."""
    stated = (getattr(config, key, None) for key in ("layers_block_type", "layer_types"))
    return next((kinds for kinds in stated if isinstance(kinds, list)), [])


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


def integer(config: object, key: str, source: str | Path, default: int | None = None) -> int:
    """Return a number of a config; ``default`` for None, if it is given."""
    value = getattr(config, key, None)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise FlexQuantError(
            f"{Path(source) / 'config.json'} has {key} {value!r}, expected a whole number from 1; correct "
            "it, or fetch it again"
        )
    return value
