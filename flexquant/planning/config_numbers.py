# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Find out what each layer of a model keeps of a request, and through how many experts a token goes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexquant.checkpoint.built_model import nothing_fetched
from flexquant.errors import FlexQuantError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NUMBER_BYTES = 2
"""Bytes of one number in the KV cache and in states: 16 bits, vLLM's default."""
TOKENS = 8
"""Tokens of the pass by which the caches are found; more than the columns that a convolution keeps."""
ACTIVE_EXPERTS = ("num_experts_per_tok", "moe_topk", "top_k_experts")
"""Names of the number of experts that a token goes through; most config classes map theirs to the first."""


@dataclass(frozen=True)
class LayerCache:
    """What a decoder layer keeps of a request, and the heads of its attention, on all devices together."""

    states: int
    """Numbers in the states that replace a KV cache."""
    heads: int = 0
    """Heads of keys and values; 0: the layer has no attention."""
    width: int = 0
    """Numbers of a key and a value."""
    queries: int = 0
    is_shared: bool = False
    """Whether its keys and values are those of an earlier layer."""

    def repeated(self, devices: int) -> int:
        """Return by how much more keys and values a token has on all devices: each has a head at least."""
        return (max(1, devices // self.heads) - 1) * self.heads * self.width if self.heads else 0

    def check(self, devices: int, source: str | Path) -> None:
        """Raise FlexQuantError, which names the model ``source``, unless each device gets as many heads."""
        if not self.heads:
            return
        few, many = sorted((self.heads, devices))
        if self.queries % devices or many % few:
            heads = f"{self.queries} attention heads and {self.heads} KV heads"
            problem = f"{source} has {heads}, which {devices} devices cannot share evenly"
            raise FlexQuantError(f"{problem}; give a --tensor-parallel-size that divides them")


def read_caches(model: Any, config: PretrainedConfig) -> list[LayerCache]:
    """Return what each decoder layer keeps, by a pass of a model of transformers on the meta device.

    ``config`` is the language model's. Raises whatever the model's class raises.
    """
    import torch

    for module in model.modules():
        # Some kinds of rotary embeddings look at the positions, which have no values there.
        if isinstance(kinds := vars(module).get("rope_type"), dict):
            module.rope_type = dict.fromkeys(kinds, "default")
        elif kinds is not None:
            module.rope_type = "default"
    model.eval().set_experts_implementation("batched_mm")  # the default one looks at the tokens' experts
    with torch.device("meta"), torch.no_grad(), nothing_fetched():
        said = model(input_ids=torch.zeros(1, TOKENS, dtype=torch.long), use_cache=True)
    number: int = config.num_hidden_layers
    # Few models have other heads in some layers.
    configs = getattr(config, "per_layer_config", None) or [config] * number
    found = []
    kept = getattr(getattr(said, "past_key_values", None), "layers", ())
    for layer, of_layer in zip(kept, configs, strict=False):
        cache = LayerCache(sum(_states(layer)))
        if (keys := getattr(layer, "keys", None)) is not None:
            width, heads = keys.shape[-1] + layer.values.shape[-1], keys.shape[1]
            heads = min(heads, getattr(of_layer, "num_kv_heads", heads))  # Falcon keeps some several times
            cache = LayerCache(cache.states, heads, width, of_layer.num_attention_heads)
        found.append(cache)
    # The last layers can read the KV cache of layers before them, as in Gemma 3n.
    kinds = getattr(config, "layer_types", None) or [None] * number
    last = dict(zip(kinds, found, strict=False))
    of_others = [last[kind] for kind in kinds[len(found) : number] if kind in last]
    return found + [replace(cache, is_shared=True) for cache in of_others]


def _states(layer: Any) -> Iterator[int]:
    """Yield the numbers of each state of a layer; transformers keeps a column more of a convolution."""
    recurrent, convolved = (getattr(layer, f"{kind}_states", {}).values() for kind in ("recurrent", "conv"))
    yield from (kept.numel() for kept in recurrent if kept is not None)
    yield from (kept[..., 1:].numel() for kept in convolved if kept is not None)


def active_experts(config: object, source: str | Path) -> int:
    """Return the experts that each token goes through; some models state them by layer, all alike."""
    found = (getattr(config, key, None) for key in ACTIVE_EXPERTS)
    stated = next((number for number in found if number is not None), None)
    each = stated if isinstance(stated, list) else [stated]
    if not each or any(type(number) is not int or number < 1 or number != each[0] for number in each):
        problem = "does not say how many of them every token goes through, so passes cannot be predicted"
        said = f"{source} has experts, and {' or '.join(ACTIVE_EXPERTS)} {stated!r}"
        raise FlexQuantError(f"{said} {problem}; measure them with 'flexquant tune'")
    return int(each[0])
