# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Measure the variants: an engine for each, and rounds of passes until their times decide.

All that later steps need of a run is here: its samples, its kernels, its memory and where it was made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint, folder_label
from flexquant.checkpoint.model_config import JsonObject, count_layers, text_config
from flexquant.checkpoint.weight_bytes import bytes_in_use, report_checkpoint
from flexquant.errors import UsageError
from flexquant.evaluation.engine import describe_machine, describe_versions
from flexquant.evaluation.workers import Worker, start_workers
from flexquant.planning.config_numbers import Attention, language_config
from flexquant.policy.routes import build_route_table
from flexquant.policy.rules import Policy
from flexquant.serving.kernels import STAND_INS
from flexquant.tuning.objectives import Goal
from flexquant.tuning.rounds import Grid, Rounds, between
from flexquant.tuning.samples import MEASURED_PHASES, Samples
from flexquant.tuning.size_thresholds import (
    TooNoisyError,
    check_decidable,
    choose_by_size,
    fastest,
    relative_speed,
    wide,
)

UTILISATION = 0.9
"""Share of the memory that vLLM takes by default."""


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
    def of(cls, checkpoint: MergedCheckpoint, variants: Mapping[str, Policy], devices: int) -> Memory:
        """Read the checkpoint's headers and this machine's memory; ``find_variants`` gives ``variants``."""
        from vllm.platforms import current_platform

        merged, number = checkpoint.merged, count_layers(checkpoint.config)
        own: dict[str, dict[str, int]] = {}
        for name, policy in variants.items():
            routes = build_route_table(
                policy, merged.variants, number, sys.maxsize, mixable=merged.mixable_groups
            )
            layers = {v: layers for v, layers in routes.layers.items() if routes.has_weights(v)}
            sources = {v: routes.source(v) for v in routes.derived}
            found = bytes_in_use(merged, checkpoint.tensors, layers, sources)
            own[name] = {v: sum(found[v].values()) for v in layers}
        return cls(
            UTILISATION * devices * current_platform.get_device_total_memory(),
            report_checkpoint(merged, number, checkpoint.tensors).shared_bytes,
            own,
        )

    def requests(self, variants: Sequence[str], request: float) -> int:
        """Return how many requests, each with ``request`` bytes of KV cache, fit beside the variants."""
        left = self.total - self.shared - sum(self._loaded(variants).values())
        return max(0, int(left / request))

    def saved(self, variants: Sequence[str]) -> dict[str, int]:
        """Return the bytes of each variant whose weights these candidates do not load."""
        loaded = self._loaded(variants)
        return {v: size for v, size in self._loaded(list(self.own)).items() if v not in loaded}

    def _loaded(self, candidates: Sequence[str]) -> dict[str, int]:
        """Return the bytes of each variant, of which several candidates can load layers."""
        found: dict[str, int] = {}
        for candidate in candidates:
            for variant, size in self.own[candidate].items():
                found[variant] = max(size, found.get(variant, 0))
        return found

    def utilisation(self, variant: str) -> float:
        """Return the share of each device's memory for this variant's engine, with one engine per variant.

        The memory that the weights leave is divided evenly.
        """
        engines = {name: self.shared + sum(own.values()) for name, own in self.own.items()}
        share = engines[variant] + (self.total - sum(engines.values())) / len(engines)
        return UTILISATION * share / self.total


Bar = Callable[..., AbstractContextManager[Callable[[int, int], None]]]


class Measurement:
    """The times of a checkpoint's variants on this machine, measured or still to be measured."""

    def __init__(
        self,
        folder: Path,
        variants: Mapping[str, Policy],
        grid: Grid,
        file: Path,
        *,
        overwrite: bool = False,
        tensor_parallel_size: int = 1,
        enforce_eager: bool = False,
    ) -> None:
        """Check the inputs, and load the samples of an interrupted run from ``file``.

        ``variants`` maps each variant, the most precise first, to the policy that runs every pass in it.
        Raises FlexQuantError for a folder that is no merged checkpoint, and for samples of another run unless
        ``overwrite`` is set.
        """
        self._checkpoint = MergedCheckpoint.open(folder, published=True)
        self.variants = variants
        self._max_length = text_config(self._checkpoint.config).get("max_position_embeddings")
        self.grid = grid.fitting(self._max_length)
        self.memory = Memory.of(self._checkpoint, variants, tensor_parallel_size)
        self._serving = {"tensor_parallel_size": tensor_parallel_size, "enforce_eager": enforce_eager}
        self.run = {
            "model": folder_label(folder),
            "variants": {name: policy.document for name, policy in variants.items()},
            "files": {
                file.name: [file.stat().st_size, file.stat().st_mtime_ns]
                for file in sorted(folder.glob("*.safetensors"))
            },
            "context": [self.grid.context, self.grid.long_context],
            "limits": self.grid.engine_options(self._max_length),
            "engine_arguments": self._serving,
            "machine": describe_machine(),
            "versions": describe_versions(),
        }
        """What the samples belong to: another run's are not gone on with."""
        self._file = file
        try:
            self.samples = Samples.load(file, self.run)
        except UsageError:
            if not overwrite:
                raise
            self.samples = Samples()
        self.kernels: dict[str, list[str]] = {}
        """Variant -> kernels of its engine, if one was started."""

    @property
    def names(self) -> list[str]:
        return list(self.variants)

    def measure(self, progress: Callable[[str], None], bar: Bar) -> None:
        """Measure what the samples lack, and save them after every size.

        Raises FlexQuantError if an engine fails, and if the machine is too noisy to decide.
        """
        with ExitStack() as stack:

            def start() -> Mapping[str, Worker]:
                progress(f"starting {', '.join(self.variants)}")
                workers = stack.enter_context(
                    start_workers(self.variants, self._checkpoint.folder, self._engine_options)
                )
                self.kernels = {name: worker.kernels for name, worker in workers.items()}
                for note in stand_in_notes(self.kernels):
                    progress(note)
                return workers

            show = stack.enter_context(bar("measuring", unit="size"))
            rounds = Rounds(self.names, start, self.samples, self.grid, self._save, show)
            effort = self.grid.effort
            rounds.measure(effort.rounds, self.grid.decode, self.grid.prefill)
            if self.grid.refine:
                finer = {phase: self._beside_crossovers(phase) for phase in MEASURED_PHASES}
                rounds.measure(effort.rounds, finer["decode"], finer["prefill"])
            rounds.add(lambda phase: wide(self.samples, self.names, phase, effort.width))
        try:
            check_decidable(self.samples, self.names)
        except TooNoisyError as e:
            for phase, sizes in e.sizes.items():
                for size in sizes:
                    self.samples.forget(phase, size)
            self._save()
            raise

    def requests_of(self, goal: Goal) -> Callable[[Sequence[str]], int]:
        """Return what tells how many of the goal's requests fit beside the weights of variants."""

        def requests(variants: Sequence[str]) -> int:
            folder = self._checkpoint.folder
            attention = Attention.read(language_config(self._checkpoint.config, folder), 1, folder)
            return self.memory.requests(variants, goal.request_tokens * attention.kv_bytes_per_token)

        return requests

    def discard_samples(self) -> None:
        """Delete the samples' file, once what follows from them is written."""
        self._file.unlink(missing_ok=True)

    def _save(self) -> None:
        self.samples.save(self._file, self.run)

    def _beside_crossovers(self, phase: str) -> list[int]:
        """Return a size in the middle of each pair of measured sizes between which the variant changes."""
        cost, crossing = fastest(self.samples, self.names), relative_speed(self.samples)
        decision = choose_by_size(self.samples, self.names, cost, crossing)
        brackets = [r.between for r in decision.ranges[phase] if r.between is not None]
        return [middle for bracket in brackets if (middle := between(*bracket)) is not None]

    def _engine_options(self, variant: str) -> JsonObject:
        return {
            **self.grid.engine_options(self._max_length),
            "gpu_memory_utilization": self.memory.utilisation(variant),
            **self._serving,
        }


def stand_in_notes(kernels: Mapping[str, Sequence[str]]) -> list[str]:
    """Warn of variants that run on a stand-in, as this machine has no fast kernel for them."""
    return [
        f"{variant} runs on {name}, {STAND_INS[name]}: its times say nothing about other machines."
        for variant, names in kernels.items()
        for name in names
        if name in STAND_INS
    ]
