# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Compute how the devices' memory divides into weights and KV cache, by the loaded variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexquant.checkpoint.contents import report_checkpoint
from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
from flexquant.checkpoint.model_config import count_layers
from flexquant.planning.predicting import UTILIZATION
from flexquant.policy.rules import Policy


@dataclass(frozen=True)
class Memory:
    """The devices' memory for weights and KV cache, and the bytes of the weights."""

    total: float
    """Bytes on all devices together that weights and KV cache may take."""
    shared: int
    """Bytes of the weights that are loaded with any variant."""
    own: Mapping[str, int]
    """Variant -> bytes that it takes beyond the shared weights."""

    @classmethod
    def of(cls, checkpoint: MergedCheckpoint, variants: Mapping[str, Policy], devices: int) -> Memory:
        """Read the checkpoint's headers and this machine's memory; ``find_variants`` gives ``variants``."""
        from vllm.platforms import current_platform

        report = report_checkpoint(checkpoint.merged, count_layers(checkpoint.config), checkpoint.tensors)
        sources = {
            name: policy.derived[name].source if name in policy.derived else name
            for name, policy in variants.items()
        }
        return cls(
            UTILIZATION * devices * current_platform.get_device_total_memory(),
            report.shared_bytes,
            {name: report.variants[source].own_bytes for name, source in sources.items()},
        )

    def requests(self, variants: Sequence[str], request: float) -> int:
        """Return how many requests, each with ``request`` bytes of KV cache, fit beside the variants."""
        left = self.total - self.shared - sum(self.own[v] for v in variants)
        return max(0, int(left / request))

    def utilisation(self, variant: str) -> float:
        """Return the share of each device's memory for this variant's engine, with one engine per variant.

        The memory that the weights leave is divided evenly.
        """
        left = self.total - sum(self.own.values()) - len(self.own) * self.shared
        share = self.own[variant] + self.shared + left / len(self.own)
        return UTILIZATION * share / self.total
