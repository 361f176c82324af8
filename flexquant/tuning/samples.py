# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Which sizes of passes are measured, and their times by variant, phase, size and round."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.output import read_earlier, write_text
from flexquant.documents import parse_json
from flexquant.errors import FlexQuantError, UsageError
from flexquant.evaluation.comparison import Comparison, Effort, compare
from flexquant.evaluation.workers import MAX_STEPS
from flexquant.policy.pass_times import PassTimes, Time
from flexquant.policy.schema import Phase

MEASURED_PHASES: tuple[Phase, ...] = ("decode", "prefill")
"""Phases whose passes are measured; the time of a mixed pass is that of a prefill pass."""
MARGIN = 0.02
"""Largest slowdown (2 %), by its interval's low end, of a tie; least gain that makes a further range."""
DOUBTFUL = 0.15
"""A size is undecided if a variant there can be as fast as the fastest, or slower by more than this share."""
MOST_DOUBTFUL = 1 / 3
"""Largest share of undecided sizes; with more, the machine counts as too noisy."""
SERVED_SEQUENCES = 256
SERVED_TOKENS = 2048
"""vLLM's default limits of a pass on most devices; they decide which CUDA graphs are captured."""


@dataclass(frozen=True)
class Grid:
    """The sizes of passes to measure, how often and for how long."""

    decode: tuple[int, ...]
    """Sequences of the decode passes, ascending."""
    prefill: tuple[int, ...]
    """Tokens of the prefill passes, ascending."""
    context: int
    """Tokens of every sequence in the KV cache when decoding begins."""
    effort: Effort
    seconds: float
    """Seconds for each size in each round, in which the pass is repeated."""

    @property
    def passes(self) -> list[tuple[str, int]]:
        return [*(("decode", size) for size in self.decode), *(("prefill", size) for size in self.prefill)]

    def up_to(self, max_batch: int | None = None, max_tokens: int | None = None) -> Self:
        """Return a grid with the given largest sizes; None leaves a largest size as it is."""
        decode = self.decode if max_batch is None else _up_to(self.decode, max_batch)
        prefill = self.prefill if max_tokens is None else _up_to(self.prefill, max_tokens)
        return replace(self, decode=decode, prefill=prefill)

    def fitting(self, max_length: int | None) -> Self:
        """Return a grid for sequences up to ``max_length`` tokens (None: any); UsageError if too few."""
        if max_length is None:
            return self
        needed = self.context + 2 * MAX_STEPS
        if max_length <= needed:
            problem = f"the model's sequences have at most {max_length} tokens, but tuning needs more than"
            raise UsageError(f"{problem} {needed}; give a model with a larger max_position_embeddings")
        return self.up_to(max_tokens=min(self.prefill[-1], max_length - 1))

    def engine_options(self) -> JsonObject:
        """Return vLLM's engine arguments for these sizes."""
        return {
            "max_num_seqs": max(SERVED_SEQUENCES, self.decode[-1]),
            "max_num_batched_tokens": max(SERVED_TOKENS, self.prefill[-1], self.decode[-1]),
            "max_model_len": max(self.prefill[-1] + 1, self.context + 2 * MAX_STEPS),
            "enable_prefix_caching": False,
        }


def _powers_of_two(last: int, first: int = 1) -> tuple[int, ...]:
    return tuple(2**i for i in range(first.bit_length() - 1, last.bit_length()))


CPU = Grid(_powers_of_two(64), _powers_of_two(1024, 8), 16, Effort(6, 12), seconds=0.3)
GPU = Grid(_powers_of_two(256), _powers_of_two(8192, 8), 64, Effort(9, 36), seconds=0.05)
QUICK_CPU = Grid((1, 5, 24), (12, 40, 128), 8, Effort(6, 12), seconds=0.1)
QUICK_GPU = Grid((1, 8, 32, 128), (16, 128, 1024, 4096), 64, Effort(6, 12), seconds=0.05)


def _up_to(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    return (*(size for size in sizes if size < most), most)


class Samples:
    """Seconds of a pass by variant, phase and size; the n-th values of all variants are of round n."""

    def __init__(self) -> None:
        self._seconds: dict[str, dict[str, dict[int, list[float]]]] = {}

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

    @property
    def passes(self) -> list[tuple[str, int]]:
        """Phase and size of every pass that was measured with every variant."""
        return [(phase, size) for phase in MEASURED_PHASES for size in self.sizes(phase)]

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

        def curves(phase: str) -> dict[str, dict[int, Time]]:
            return {v: {size: self.time(v, phase, size) for size in self.sizes(phase)} for v in self._seconds}

        decode, prefill = curves("decode"), curves("prefill")
        return PassTimes.model_construct(decode=decode, prefill=prefill, context=context, origin=origin)

    def save(self, file: Path, run: JsonObject) -> None:
        """Write all samples to ``file`` in one step; ``run`` describes the run that they belong to."""
        write_text(file, json.dumps({"run": run, "seconds": self._seconds}))

    @classmethod
    def load(cls, file: Path, run: JsonObject) -> Self:
        """Return what :meth:`save` wrote, or empty samples; raise UsageError for another ``run``'s."""
        run = json.loads(json.dumps(run))

        def read(text: str) -> tuple[JsonObject, Self]:
            data, samples = parse_json(text), cls()
            for variant, phases in data["seconds"].items():
                for phase, curve in phases.items():
                    of_phase = samples._seconds.setdefault(variant, {}).setdefault(phase, {})
                    of_phase.update({int(size): values for size, values in curve.items()})
            return {key: data["run"].get(key) for key in run}, samples

        foreign = "is not what an interrupted run left ({}); remove it, or give another --output"
        advice = "give another --output, run that one to its end, or replace its samples with --overwrite"
        other = "has the samples of an interrupted run with other {}; " + advice
        return read_earlier(file, run, read, foreign=foreign, other=other) or cls()


def wide(samples: Samples, variants: Sequence[str], width: float) -> list[tuple[str, int]]:
    """Return the passes in which some variant's ratio to the fastest has an interval of ``width`` or more."""

    def is_wide(phase: str, size: int) -> bool:
        return any(not c.is_narrow(width) for c in samples.to_fastest(variants, phase, size).values())

    return [one for one in samples.passes if is_wide(*one)]


def undecided(samples: Samples, variants: Sequence[str], phase: str) -> dict[int, float]:
    """Return size -> share (above DOUBTFUL) by which a variant tied with the fastest can be slower."""
    shares = {}
    for size in samples.sizes(phase):
        compared = samples.to_fastest(variants, phase, size).values()
        shares[size] = max(c.high - 1 for c in compared if c.low <= 1 + MARGIN)
    return {size: share for size, share in shares.items() if share > DOUBTFUL}


def check_decidable(samples: Samples, variants: Sequence[str]) -> None:
    """Raise FlexQuantError if more than MOST_DOUBTFUL of the sizes are undecided, and drop their samples."""
    doubtful = {phase: undecided(samples, variants, phase) for phase in MEASURED_PHASES}
    count = sum(map(len, doubtful.values()))
    total = len(samples.passes)
    if count <= MOST_DOUBTFUL * total:
        return
    for phase, sizes in doubtful.items():
        for size in sizes:
            samples.forget(phase, size)
    where = f"at {count} of {total} sizes the times of the variants overlap and scatter by more than"
    advice = "stop what else runs on it and start again, which measures these sizes anew"
    problem = f"this machine is too noisy to decide: {where} {DOUBTFUL:.0%}"
    raise FlexQuantError(f"{problem}; {advice}, or raise --max-rounds")
