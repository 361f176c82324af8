# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Find the variants that tuning chooses among, the most precise first, and their memory."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Self

from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
from flexquant.checkpoint.merged_config import SHARED, MergedConfig
from flexquant.checkpoint.model_config import count_layers
from flexquant.checkpoint.weight_bytes import report_checkpoint
from flexquant.errors import UsageError
from flexquant.policy.routes import build_route_table
from flexquant.policy.rules import Policy, find_policies, source_of

BITS_16 = 16
SOURCE = "w4a16"
FROM_INT4 = "w8a8-from-int4"
"""Built-in policy of the variant that computes INT8 weights from those of SOURCE."""
FROM_16_BIT = "int8-from-16-bit"
UTILISATION = 0.9
"""Share of the memory that vLLM takes by default."""


def find_variants(merged: MergedConfig, names: Sequence[str] | None) -> dict[str, Policy]:
    """Return variant -> policy that runs every pass in it, the most precise variant first.

    Names are variants or policies of one, as ``w4a8``. None: all, and beside one alone INT8 from it.
    """
    found: dict[str, Policy] = {}
    if not names:
        names, (first, *others) = [*merged.variants], merged.variants.values()
        names += [] if others else [FROM_16_BIT if first.is_in_16_bit else FROM_INT4]
    for name, policy in find_policies(names, merged.variants).items():
        if len(policy.rules) != 1 or policy.rules[0].layers:
            problem = f"'{name}' runs passes or layers in several variants"
            advice = f"name some of {', '.join(merged.variants)}, or a policy of one variant such as w4a8"
            raise UsageError(f"{problem}; tuning measures one variant at a time: {advice}")
        (variant,) = policy.variants
        source = source_of(variant, policy.derived)
        if source not in merged.variants:
            derived = f", from which '{variant}' is derived," if variant in policy.derived else ""
            problem = f"'{source}'{derived} is not a variant of the checkpoint"
            raise UsageError(f"{problem}: {', '.join(merged.variants)}")
        if variant in found and found[variant].derived != policy.derived:
            problem = f"{name} and another policy derive '{variant}' in different ways"
            raise UsageError(f"{problem}; rename the variant in one")
        found[variant] = policy
    if len(found) < 2:
        problem = f"there is nothing to choose from but {', '.join(found)}"
        raise UsageError(f"{problem}; give two variants or more, e.g. --variants w8a8,w4a16")
    return dict(sorted(found.items(), key=lambda item: _precision(*item, merged), reverse=True))


def eight_bit(variants: Mapping[str, Policy], merged: MergedConfig) -> str | None:
    """Return the stored variant in 8 bit, of several that with the fewest bits of activations, or None."""
    stored = [name for name, policy in variants.items() if not policy.derived]
    return next((v for v in stored[::-1] if _precision(v, variants[v], merged)[0] == 8), None)


@dataclass(frozen=True)
class Memory:
    """The devices' memory for weights and KV cache, and the bytes of the weights."""

    total: float
    """Bytes on all devices together that weights and KV cache may take."""
    shared: int
    """Bytes of the weights that are loaded with any variant."""
    own: Mapping[str, Mapping[str, int]]
    """Candidate -> variant whose weights it loads -> bytes beyond the shared weights."""

    @classmethod
    def of(cls, checkpoint: MergedCheckpoint, variants: Mapping[str, Policy], devices: int) -> Self:
        """Read the checkpoint's headers and this machine's memory; ``find_variants`` gives ``variants``."""
        from vllm.platforms import current_platform

        merged, number = checkpoint.merged, count_layers(checkpoint.config)
        own: dict[str, dict[str, int]] = {}
        for name, policy in variants.items():
            mixed = merged.mixable_groups, merged.nested
            routes = build_route_table(policy, merged.variants, number, sys.maxsize, *mixed)
            found = routes.stored_bytes(checkpoint, routes.plans)
            own[name] = {v: sum(sizes.values()) for v, sizes in found.items() if v != SHARED}
        total = UTILISATION * devices * current_platform.get_device_total_memory()
        return cls(total, report_checkpoint(merged, number, checkpoint.tensors).shared_bytes, own)

    def requests(self, variants: Sequence[str], request: float) -> int:
        """Return how many requests, each with ``request`` bytes of KV cache, fit beside the variants."""
        left = self.total - self.shared - sum(self._loaded(variants).values())
        return max(0, int(left / request))

    def saved(self, variants: Sequence[str]) -> dict[str, int]:
        """Return the bytes of each variant whose weights these candidates do not load."""
        loaded = self._loaded(variants)
        return {v: size for v, size in self._loaded([*self.own]).items() if v not in loaded}

    def _loaded(self, candidates: Sequence[str]) -> Counter[str]:
        """Return the bytes of each variant, the most that a candidate loads: they share its layers."""
        return reduce(or_, (Counter(self.own[candidate]) for candidate in candidates))

    def utilisation(self, variant: str) -> float:
        """Return a variant's share of each device's memory: its weights, and an even part of the rest."""
        engines = {name: self.shared + sum(own.values()) for name, own in self.own.items()}
        share = engines[variant] + (self.total - sum(engines.values())) / len(engines)
        return UTILISATION * share / self.total


def _precision(name: str, policy: Policy, merged: MergedConfig) -> tuple[int, int]:
    """Return the bits of weights and of activations."""
    source = merged.variants[source_of(name, policy.derived)]

    def least_bits(kind: str) -> int:
        numbers = (group.get(kind) for group in source.quantization_config.get("config_groups", {}).values())
        return min((BITS_16 if n is None else int(n["num_bits"]) for n in numbers), default=BITS_16)

    return least_bits("weights"), 8 if name in policy.derived else least_bits("input_activations")
