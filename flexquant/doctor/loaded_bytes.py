# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Count the bytes that plans would take in memory, by variant and decoder layer, without loading them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flexquant.checkpoint.merged_config import SHARED
from flexquant.checkpoint.model_config import JsonObject
from flexquant.doctor.examining import built_without_weights, engine_config
from flexquant.errors import FlexQuantError
from flexquant.measuring.engine import environment
from flexquant.policy.plans import Layers


@dataclass(frozen=True)
class LoadedBytes:
    """The bytes of one rank's weights, counted as `flexquant doctor` does."""

    by_layer: Mapping[str, Mapping[int | None, int]]
    """Variant or SHARED -> decoder layer, or None for what lies outside of layers -> bytes."""
    sources: Mapping[str, str]
    """Variant that computes its weights -> the variant that it computes them from."""
    weights: int
    """Number of weights in the decoder layers."""
    cache_tokens: Callable[[int], int]
    """Returns the tokens of the KV cache that a server has beside so many bytes of weights."""

    def of(self, plans: Iterable[Layers]) -> int:
        """Return the bytes of a policy with these plans."""
        return sum(self._loaded(plans).values())

    def bits(self, plans: Iterable[Layers]) -> float:
        """Return the bits that a weight of the decoder layers takes, scales included."""
        inside = (size for (_, layer), size in self._loaded(plans).items() if layer is not None)
        return 8 * sum(inside) / self.weights

    def most_beside(self, tokens: int) -> int:
        """Return the most bytes of weights beside which the KV cache has ``tokens`` tokens.

        It is no more than all weights together take. Raises FlexQuantError if the cache has no room for so
        many tokens even without weights.
        """
        if self.cache_tokens(0) < tokens:
            raise FlexQuantError(
                f"there is memory for a KV cache of {self.cache_tokens(0):,} tokens without any weights, and "
                f"{tokens:,} are asked for; give fewer --kv-tokens, or more --tensor-parallel-size"
            )
        fits, too_many = 0, 1 + sum(sum(sizes.values()) for sizes in self.by_layer.values())
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            fits, too_many = (middle, too_many) if self.cache_tokens(middle) >= tokens else (fits, middle)
        return fits

    def _loaded(self, plans: Iterable[Layers]) -> dict[tuple[str, int | None], int]:
        used = {(variant, layer) for plan in plans for layer, variant in enumerate(plan)}
        used |= {(self.sources[variant], layer) for variant, layer in used if variant in self.sources}
        places = {*used, *((variant, None) for variant, _ in used)}
        shared = {(SHARED, layer): size for layer, size in self.by_layer[SHARED].items()}
        return {(v, layer): self.by_layer[v].get(layer, 0) for v, layer in places} | shared


def count_bytes(folder: Path, policy: JsonObject, devices: int) -> LoadedBytes:
    """Count for a merged checkpoint and a policy that takes all layers of the variants in question.

    Raises FlexQuantError if the policy cannot be served here.
    """
    level = os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as work, environment(VLLM_LOGGING_LEVEL=level):
        file = Path(work, "policy.json")
        file.write_text(json.dumps(policy), encoding="utf-8")
        options = json.dumps({"flexquant": {"policy": str(file)}})
        arguments = ["--additional-config", options, "--tensor-parallel-size", str(devices)]
        vllm_config = engine_config(str(folder), arguments)
        from flexquant.doctor.built_model import asked_for_cache, cache_bytes_per_token, memory_of_weights
        from flexquant.serving.worker.weight_memory import weights_of_layers

        with built_without_weights(vllm_config) as model:
            variants, routes = dict(model.variants.items()), model.routes
            per_token = cache_bytes_per_token(vllm_config)
            return LoadedBytes(
                memory_of_weights(variants).nbytes_by_layer(),
                {name: routes.source(name) for name in variants if not routes.has_weights(name)},
                max(map(weights_of_layers, variants.values())),
                lambda nbytes: max(0, asked_for_cache(vllm_config, nbytes)) // per_token,
            )
