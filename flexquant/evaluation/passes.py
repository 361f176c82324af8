# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What really ran, counted from vLLM's trace of forward passes, against what was meant to run."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Passes:
    """Forward passes of a run."""

    by_plan: dict[str, dict[str, int]]
    """Phase -> plan -> number of passes."""
    decode_batch_sizes: dict[int, int]
    """Sequences in a decode pass -> number of passes."""

    @classmethod
    def from_trace(cls, path: Path) -> Passes:
        """Count the passes of a trace file, its first line (what is served) left out."""
        passes = [json.loads(line) for line in path.read_text().splitlines()[1:]]
        by_plan: dict[str, dict[str, int]] = {}
        for (phase, plan), count in sorted(Counter((p["phase"], p["plan"]) for p in passes).items()):
            by_plan.setdefault(phase, {})[plan] = count
        sizes = Counter(p["sequences"] for p in passes if p["phase"] == "decode")
        return cls(by_plan, dict(sorted(sizes.items())))

    def deviations(self, prefill: str, decode: str, batch_size: int, batches: int, tokens: int) -> list[str]:
        """Say what differs from one prefill and ``tokens - 1`` decode passes a batch, in those plans."""
        meant = {"prefill": {prefill: batches}}
        if tokens > 1:
            meant["decode"] = {decode: batches * (tokens - 1)}
        found = []
        for phase in sorted({*meant, *self.by_plan}):
            if self.by_plan.get(phase) != meant.get(phase):
                found.append(
                    f"{phase} passes were {_describe(self.by_plan.get(phase))}, "
                    f"but {_describe(meant.get(phase))} were meant"
                )
        if others := [size for size in self.decode_batch_sizes if size != batch_size]:
            sizes = ", ".join(map(str, others))
            found.append(f"some decode passes had {sizes} sequences instead of {batch_size}")
        return found


def _describe(plans: dict[str, int] | None) -> str:
    return ", ".join(f"{count} of {plan}" for plan, count in plans.items()) if plans else "none"
