# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Count passes, tokens and seconds of every plan and phase, for ``/metrics`` and ``/flexquant``.

A worker counts, since it sees every pass, even one that vLLM replays from a FULL graph. The API server asks
for its counters (:mod:`flexquant.serving.frontend.metrics`). One worker of an engine counts, since all
workers run the same passes.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from vllm.config import CUDAGraphMode

from flexquant.checkpoint.model_config import JsonObject
from flexquant.serving.worker.forward_pass import Pass
from flexquant.serving.worker.pass_times import PassClock

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SIZE_BUCKETS = (1, 2, 3, *(factor << power for power in range(1, 13) for factor in (2, 3)), 1 << 14)
"""Upper ends of the buckets of passes by size: 1, 2, 3, 4, 6, 8, 12, 16, ..., 8192, 12288, 16384."""
SIZE_ENDS = [*(f"{end}.0" for end in SIZE_BUCKETS), "+Inf"]
"""The same as Prometheus writes them, with the bucket of all larger sizes."""


@dataclass(slots=True)
class PlanCounters:
    """Counters of one plan and phase."""

    forward: int = 0
    tokens: int = 0
    """Tokens without padding."""
    padded_tokens: int = 0
    seconds: float = 0.0
    size: int = 0
    """Sum of the sizes of all passes: their sequences in decode, else their tokens, without padding."""
    buckets: list[int] = field(default_factory=lambda: [0] * len(SIZE_ENDS))
    """Number of passes in each bucket of sizes, in the order of SIZE_ENDS."""
    replays: Counter[str] = field(default_factory=Counter)
    """Mode of CUDA graphs -> number of passes that ran from such graphs."""

    def add_seconds(self, seconds: float) -> None:
        self.seconds += seconds

    def to_data(self) -> dict[str, float]:
        """Return the counters but the buckets, by their names in ``/metrics`` without ``flexquant:``."""
        return {
            "forward": self.forward,
            "tokens": self.tokens,
            "padded_tokens": self.padded_tokens,
            "forward_seconds": self.seconds,
        } | {f"graph_replays_{mode}": number for mode, number in self.replays.items()}


class PassMetrics:
    """The counters of one engine."""

    def __init__(self, engine: str, device: torch.device) -> None:
        """Count for an engine, given by its data-parallel index; ``device`` runs the passes."""
        self._engine = engine
        self._of: dict[tuple[str, str], PlanCounters] = {}
        self.clock: PassClock[PlanCounters] = PassClock(device, PlanCounters.add_seconds)
        self._last: PlanCounters | None = None
        """Counters of the pass that was counted last."""
        self._policies: dict[tuple[str, str], int] = {}
        """(Name, digest) of each policy that has routed -> whether it routes now."""

    @classmethod
    def of_worker(cls, vllm_config: VllmConfig) -> PassMetrics | None:
        """Return the counters of this worker; None if another worker counts for its engine.

        The first rank of the last pipeline stage counts, as it computes logits, with which a pass ends.
        """
        parallel = vllm_config.parallel_config
        if parallel.rank != parallel.world_size - parallel.tensor_parallel_size:
            return None
        device = torch.device(vllm_config.device_config.device_type)
        return cls(str(parallel.data_parallel_index), device)

    def announce_policy(self, name: str, digest: str) -> None:
        """Note which policy routes from now on; ``digest`` is the digest of its document."""
        self._policies = {**dict.fromkeys(self._policies, 0), (name, digest): 1}

    def count_pass(self, forward_pass: Pass, plan: str, graph: CUDAGraphMode) -> None:
        """Count a pass; ``graph`` is the mode of the CUDA graphs that it runs from."""
        where = plan, forward_pass.phase
        counters = self._of.get(where) or self._of.setdefault(where, PlanCounters())
        self._last = counters
        counters.forward += 1
        counters.tokens += forward_pass.scheduled_tokens
        counters.padded_tokens += forward_pass.tokens
        size = forward_pass.sequences if forward_pass.phase == "decode" else forward_pass.scheduled_tokens
        counters.buckets[bisect_left(SIZE_BUCKETS, size)] += 1
        counters.size += size
        if graph != CUDAGraphMode.NONE:
            counters.replays[graph.name] += 1

    def time_pass(self) -> None:
        """Count the seconds of the pass that has ended, which is counted by now; on a GPU with delay."""
        if self._last is not None:
            self.clock.attribute(self._last)

    def counted(self) -> list[JsonObject]:
        """Return a record for each plan and phase that has run, with the counters by name."""
        return [
            {"plan": plan, "phase": phase, **counters.to_data()}
            for (plan, phase), counters in self._of.items()
        ]

    def to_data(self) -> JsonObject:
        """Return all counters, and the policies, for ``/metrics``.

        ``sizes`` has a histogram for each record of ``counted``: the upper end of each bucket with the number
        of passes up to it, and the sum of the passes' sizes.
        """
        return {
            "engine": self._engine,
            "policies": [[*policy, routes] for policy, routes in self._policies.items()],
            "counted": self.counted(),
            "sizes": [
                [[*zip(SIZE_ENDS, itertools.accumulate(counters.buckets), strict=True)], counters.size]
                for counters in self._of.values()
            ],
        }
