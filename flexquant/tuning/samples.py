# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Hold the measured times by variant, phase, size and round, and compare variants by ratios within rounds.

Machines drift and stall, so only ratios within a round count (flexquant.evaluation.comparison).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.output import read_earlier, write_text
from flexquant.evaluation.comparison import Comparison, compare
from flexquant.policy.pass_times import PassTimes, Time
from flexquant.policy.schema import Phase

MEASURED_PHASES: tuple[Phase, ...] = ("decode", "prefill")
"""Phases whose passes are measured; the time of a mixed pass is that of a prefill pass."""


class Samples:
    """Seconds of a pass by variant, phase and size; the n-th values of all variants are of round n."""

    def __init__(self) -> None:
        self._seconds: dict[str, dict[str, dict[int, list[float]]]] = {}
        self.context_seconds: list[float] = []
        """Seconds that one more token in the KV cache adds to a pass, measured once a round."""

    def add(self, variant: str, phase: str, size: int, seconds: float) -> None:
        self._seconds.setdefault(variant, {}).setdefault(phase, {}).setdefault(size, []).append(seconds)

    def count(self, variant: str, phase: str, size: int) -> int:
        """Return in how many rounds the pass has been measured."""
        return len(self._seconds.get(variant, {}).get(phase, {}).get(size, ()))

    def forget(self, phase: str, size: int) -> None:
        """Drop all variants' samples of a size, so that it is measured again."""
        for phases in self._seconds.values():
            phases.get(phase, {}).pop(size, None)

    def sizes(self, phase: str) -> list[int]:
        """Return the sizes at which every variant was measured, ascending."""
        curves = [set(phases.get(phase, ())) for phases in self._seconds.values()]
        return sorted(set.intersection(*curves)) if curves else []

    def time(self, variant: str, phase: str, size: int) -> Time:
        seconds = self._seconds[variant][phase][size]
        return Time(statistics.median(seconds), min(seconds), max(seconds))

    def compare(self, variant: str, other: str, phase: str, size: int) -> Comparison:
        """Compare the time of ``variant`` to that of ``other`` over the rounds that both have."""
        pairs = zip(self._seconds[variant][phase][size], self._seconds[other][phase][size], strict=False)
        return compare([a / b for a, b in pairs])

    def to_fastest(self, variants: Sequence[str], phase: str, size: int) -> dict[str, Comparison]:
        """Compare each variant's time to that of the variant with the smallest median."""
        best = min(variants, key=lambda v: self.time(v, phase, size).median)
        return {variant: self.compare(variant, best, phase, size) for variant in variants}

    def pass_times(self, context: int, origin: JsonObject) -> PassTimes:
        """Return the times of all passes; :class:`PassTimes` explains ``context`` and ``origin``."""
        decode, prefill = (
            {
                variant: {size: self.time(variant, phase, size) for size in self.sizes(phase)}
                for variant in self._seconds
            }
            for phase in MEASURED_PHASES
        )
        cost = statistics.median(self.context_seconds) if self.context_seconds else 0.0
        return PassTimes(decode, prefill, context, max(0.0, cost), origin)

    def save(self, file: Path, run: JsonObject) -> None:
        """Write all samples to ``file`` in one step; ``run`` describes the run that they belong to."""
        data = {"run": run, "seconds": self._seconds, "context_seconds": self.context_seconds}
        write_text(file, json.dumps(data))

    @classmethod
    def load(cls, file: Path, run: JsonObject) -> Samples:
        """Return the samples that :meth:`save` wrote for the same ``run``; without a file, empty samples.

        Raises UsageError, which says what differs, for the samples of another run: they can be hours of
        work, and the first save would replace them.
        """
        run = json.loads(json.dumps(run))

        def read(text: str) -> tuple[JsonObject, Samples]:
            data, samples = json.loads(text), cls()
            samples.context_seconds = data["context_seconds"]
            samples._seconds = {
                variant: {
                    phase: {int(size): values for size, values in curve.items()}
                    for phase, curve in phases.items()
                }
                for variant, phases in data["seconds"].items()
            }
            return {key: data["run"].get(key) for key in run}, samples

        found = read_earlier(
            file,
            run,
            read,
            foreign="is not what an interrupted run left ({}); remove it, or give another --output",
            other="has the samples of an interrupted run with other {}; give another --output, run that one "
            "to its end, or replace its samples with --overwrite",
        )
        return cls() if found is None else found
