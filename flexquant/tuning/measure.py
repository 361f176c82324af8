# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Measure the variants: an engine for each, and rounds of passes until their times decide.

All that later steps need of a run is here: its samples, its kernels, its memory and where it was made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint, folder_label
from flexquant.checkpoint.model_config import JsonObject, text_config
from flexquant.errors import UsageError
from flexquant.measuring.comparison import Effort
from flexquant.measuring.machine import describe_machine, describe_versions
from flexquant.measuring.workers import Worker, start_workers
from flexquant.planning.config_numbers import Attention, language_config
from flexquant.policy.rules import Policy
from flexquant.serving.kernels import STAND_INS
from flexquant.tuning.candidates import Memory
from flexquant.tuning.objectives import Goal
from flexquant.tuning.samples import MEASURED_PHASES, Grid, Samples, between
from flexquant.tuning.size_thresholds import check_decidable, choose_by_size, fastest, relative_speed, wide

Bar = Callable[..., AbstractContextManager[Callable[[int, int], None]]]
Sizes = Mapping[str, Sequence[int]]
"""Phase -> sizes of its passes."""


class Rounds:
    """Measures what the samples lack, the variants in turn at every size, and calls ``save`` after each."""

    def __init__(
        self,
        names: Sequence[str],
        time: Callable[[str, str, int], float],
        samples: Samples,
        save: Callable[[], None],
        progress: Callable[[int, int], None],
    ) -> None:
        """``time(variant, phase, size)`` measures a pass; ``progress`` gets the sizes done and planned."""
        self._names = names
        self._time = time
        self._samples = samples
        self._save = save
        self._progress = progress
        self._done = self._planned = 0

    def measure(self, rounds: int, sizes: Sizes) -> None:
        """Measure until every size has been measured in ``rounds`` rounds, with all variants."""
        cells = [(phase, size) for phase in MEASURED_PHASES for size in sorted(sizes[phase])]
        missing = [[cell for cell in cells if self._count(*cell) <= number] for number in range(rounds)]
        self._planned += sum(map(len, missing))
        for number, lacking in enumerate(missing):
            for phase, size in lacking:
                for name in self._names[:: -1 if number % 2 else 1]:
                    self._samples.add(name, phase, size, self._time(name, phase, size))
                self._done += 1
                self._progress(self._done, self._planned)
                self._save()

    def add(self, effort: Effort) -> None:
        """Add rounds, up to the most, over the sizes with a ratio that is not as narrow as it should be."""
        for rounds in range(effort.rounds + 1, effort.max_rounds + 1):
            sizes = {
                phase: wide(self._samples, self._names, phase, effort.width) for phase in MEASURED_PHASES
            }
            if not any(sizes.values()):
                return
            self.measure(rounds, sizes)

    def _count(self, phase: str, size: int) -> int:
        return min(self._samples.count(name, phase, size) for name in self._names)


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
            "context": self.grid.context,
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
        grid, effort = self.grid, self.grid.effort
        with ExitStack() as stack:

            @functools.cache
            def workers() -> Mapping[str, Worker]:
                progress(f"starting {', '.join(self.variants)}")
                started = stack.enter_context(
                    start_workers(self.variants, self._checkpoint.folder, self._engine_options)
                )
                self.kernels = {name: worker.kernels for name, worker in started.items()}
                for note in stand_in_notes(self.kernels):
                    progress(note)
                return started

            def time(name: str, phase: str, size: int) -> float:
                context = (grid.context,) if phase == "decode" else ()
                return workers()[name].call(phase, size, *context, grid.seconds)

            show = stack.enter_context(bar("measuring", unit="size"))
            rounds = Rounds(self.names, time, self.samples, self._save, show)
            rounds.measure(effort.rounds, {"decode": grid.decode, "prefill": grid.prefill})
            if grid.refine:
                rounds.measure(effort.rounds, self._beside_crossovers())
            rounds.add(effort)
        try:
            check_decidable(self.samples, self.names)
        finally:
            self._save()

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

    def _beside_crossovers(self) -> Sizes:
        """Return a size in the middle of each pair of measured sizes between which the variant changes."""
        cost, crossing = fastest(self.samples, self.names), relative_speed(self.samples)
        decision = choose_by_size(self.samples, self.names, cost, crossing)
        brackets = {
            phase: [r.between for r in found if r.between] for phase, found in decision.ranges.items()
        }
        return {
            phase: [middle for ends in found if (middle := between(*ends)) is not None]
            for phase, found in brackets.items()
        }

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
