# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Count bytes per weight of the decoder layers: what a policy keeps in memory, and what a decode pass reads.

The bytes are those stored in the checkpoint, scales and norms included, as its safetensors headers give them.
They are the same on every machine, while a kernel may hold somewhat more
(:mod:`flexquant.serving.worker.weight_memory`). Embedding and lm_head, which the policies share, are left
out. The 16-bit model has 2.0. A derived variant counts like its source, and both count if both are loaded,
since their kernels need different layouts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
from flexquant.checkpoint.module_names import LAYER
from flexquant.checkpoint.schemes import logical_shapes
from flexquant.policy.plans import Plan
from flexquant.policy.routes import RouteTable


@dataclass(frozen=True)
class BytesPerWeight:
    resident: float
    """Bytes per weight in memory: the layers that plans take from variants, shared tensors counted once."""
    decode: float
    """Bytes per weight that a decode pass reads: the layers of its plan, or the mean over several plans."""


class LayerBytes:
    """Stored bytes of a merged checkpoint's decoder layers."""

    def __init__(self, checkpoint: MergedCheckpoint) -> None:
        self.weights = 0
        """Number of weights in the 16-bit model's decoder layers."""
        self._tensors = {key: ref.nbytes for key, ref in checkpoint.tensors.items()}
        self._layers: dict[str, dict[int, list[str]]] = {}
        for name in checkpoint.merged.variants:
            keys = checkpoint.variant_keys(name)
            layers = self._layers[name] = defaultdict(list)
            for original, key in keys.items():
                if match := LAYER.search(original):
                    layers[int(match["index"])].append(key)
            shapes = logical_shapes(checkpoint.variant_tensors(name))
            weights = sum(math.prod(shape) for key, shape in shapes.items() if LAYER.search(key))
            self.weights = max(self.weights, weights)

    def per_weight(self, routes: RouteTable, decode: Plan) -> BytesPerWeight:
        """Return the bytes per weight of a policy with this route table and this plan of decode passes."""
        sources = {name: name for name in self._layers}
        sources |= {name: derivation.source for name, derivation in routes.derived.items()}
        held = {
            (key, name if name in routes.derived else None)
            for name, numbers in routes.layers.items()
            if routes.has_weights(name)
            for number in numbers
            for key in self._layers[sources[name]][number]
        }
        read = [key for i, name in enumerate(decode.layers) for key in self._layers[sources[name]][i]]
        return BytesPerWeight(
            sum(self._tensors[key] for key, _ in held) / self.weights,
            sum(self._tensors[key] for key in read) / self.weights,
        )
