# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Count bytes per weight of the decoder layers: what a policy keeps in memory, and what a decode pass reads.

The bytes are those stored in the checkpoint (:mod:`flexquant.checkpoint.weight_bytes`). Embedding and
lm_head, which the policies share, are left out. The 16-bit model has 2.0. A derived variant counts like its
source, and both count if both are loaded, since their kernels need different layouts.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
from flexquant.checkpoint.merged_config import SHARED
from flexquant.checkpoint.weight_bytes import bytes_by_layer, weights_in_layers
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
        variants = checkpoint.merged.variants
        self.weights = max(weights_in_layers(checkpoint.variant_tensors(name)) for name in variants)
        """Number of weights in the 16-bit model's decoder layers."""
        self._own = bytes_by_layer(checkpoint.merged, checkpoint.tensors)
        self._shared = self._own.pop(SHARED)

    def per_weight(self, routes: RouteTable, decode: Plan) -> BytesPerWeight:
        """Return the bytes per weight of a policy with this route table and this plan of decode passes."""
        sources = {name: name for name in self._own}
        sources |= {name: derivation.source for name, derivation in routes.derived.items()}
        held = {
            (name, number)
            for name, numbers in routes.layers.items()
            if routes.has_weights(name)
            for number in numbers
        }
        shared = {(name if name in routes.derived else None, number) for name, number in held}
        resident = sum(self._own[sources[name]][number] for name, number in held)
        resident += sum(self._shared[number] for _, number in shared)
        read = sum(
            self._own[sources[name]][number] + self._shared[number]
            for number, name in enumerate(decode.layers)
        )
        return BytesPerWeight(resident / self.weights, read / self.weights)
