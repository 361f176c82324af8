# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Run `flexquant tune`: check the inputs, measure the variants, decide, write the policy and the plot."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint, folder_label
from flexquant.checkpoint.model_config import JsonObject, count_layers, text_config
from flexquant.checkpoint.weight_bytes import bytes_in_use, report_checkpoint
from flexquant.errors import UsageError
from flexquant.measuring.machine import describe_command, describe_machine, describe_versions
from flexquant.measuring.workers import Worker, start_workers
from flexquant.planning.model_shape import read_model_shape
from flexquant.planning.predicting import UTILIZATION
from flexquant.policy.routes import build_route_table
from flexquant.policy.rules import Policy
from flexquant.tuning.deciding import (
    Decision,
    TooNoisyError,
    check_decidable,
    decide,
    fastest,
    relative_speed,
    wide,
)
from flexquant.tuning.objectives import Goal, best, meet, optimise
from flexquant.tuning.policy_file import (
    TuningFiles,
    TuningResult,
    batch_notes,
    bound_notes,
    crossover_notes,
    kernel_notes,
    origin_notes,
    stand_in_notes,
    tuned_policy_document,
    unused_notes,
    write_files,
)
from flexquant.tuning.rounds import Grid, Rounds, between
from flexquant.tuning.samples import PHASES, Samples


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
            UTILIZATION * devices * current_platform.get_device_total_memory(),
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
        return UTILIZATION * share / self.total


Bar = Callable[..., AbstractContextManager[Callable[[int, int], None]]]


class Tuning:
    """One run of `flexquant tune`."""

    def __init__(
        self,
        folder: Path,
        output: TuningFiles,
        variants: dict[str, Policy],
        goal: Goal,
        grid: Grid,
        tensor_parallel_size: int = 1,
        enforce_eager: bool = False,
        remarks: Sequence[str] = (),
    ) -> None:
        """Check the inputs, and load the samples of an interrupted run.

        ``variants`` maps each variant, the most precise first, to the policy that runs every pass in it.
        ``remarks`` are added to the notes. Raises FlexQuantError for a folder that is no merged checkpoint,
        and for samples of another run beside the output, unless they may be overwritten.
        """
        self._checkpoint = MergedCheckpoint.open(folder, published=True)
        self._output = output
        self._variants = variants
        self._goal = goal
        self._max_length = text_config(self._checkpoint.config).get("max_position_embeddings")
        self._grid = grid.fitting(self._max_length)
        self._memory = Memory.of(self._checkpoint, variants, tensor_parallel_size)
        self._serving = {"tensor_parallel_size": tensor_parallel_size, "enforce_eager": enforce_eager}
        self._remarks = remarks
        self._run = {
            "model": folder_label(folder),
            "variants": {name: policy.document for name, policy in variants.items()},
            "files": {
                file.name: [file.stat().st_size, file.stat().st_mtime_ns]
                for file in sorted(folder.glob("*.safetensors"))
            },
            "context": [self._grid.context, self._grid.long_context],
            "limits": self._grid.engine_options(self._max_length),
            "engine_arguments": self._serving,
            "machine": describe_machine(),
            "versions": describe_versions(),
        }
        self._samples = self._load_samples()
        self._kernels: dict[str, list[str]] = {}

    def measure(self, progress: Callable[[str], None], bar: Bar) -> None:
        """Measure all variants, or resume an interrupted run with the same arguments.

        Raises FlexQuantError if an engine fails, and if the machine is too noisy to decide.
        """
        with ExitStack() as stack:

            def start() -> Mapping[str, Worker]:
                progress(f"starting {', '.join(self._variants)}")
                workers = stack.enter_context(
                    start_workers(self._variants, self._checkpoint.folder, self._engine_options)
                )
                self._kernels = {name: worker.kernels for name, worker in workers.items()}
                for note in stand_in_notes(self._kernels):
                    progress(note)
                return workers

            show = stack.enter_context(bar("measuring", unit="size"))
            rounds = Rounds(self._names, start, self._samples, self._grid, self._save, show)
            effort = self._grid.effort
            rounds.measure(effort.rounds, self._grid.decode, self._grid.prefill)
            if self._grid.refine:
                finer = {phase: self._beside_crossovers(phase) for phase in PHASES}
                rounds.measure(effort.rounds, finer["decode"], finer["prefill"])
            rounds.add(lambda phase: wide(self._samples, self._names, phase, effort.width))
        try:
            check_decidable(self._samples, self._names)
        except TooNoisyError as e:
            for phase, sizes in e.sizes.items():
                for size in sizes:
                    self._samples.forget(phase, size)
            self._save()
            raise

    def decide(self, together: Sequence[Sequence[str]] | None = None) -> TuningResult:
        """Return the best policy for the goal; raise FlexQuantError if no policy meets it.

        ``together`` are sets of candidates that can be loaded together, the preferred first; None: all can.
        """
        decision = best(self._samples, [self._names] if together is None else together, self._decide)
        origin = {
            **{key: self._run[key] for key in ("model", "machine", "versions", "engine_arguments")},
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["flexquant", *describe_command()[1:]]),
            "rounds": self._grid.effort.rounds,
        }
        times = self._samples.pass_times(self._grid.context, origin)
        document = tuned_policy_document(decision, self._variants, times, str(self._goal))
        notes = [
            *origin_notes(origin, self._goal),
            *kernel_notes(self._kernels),
            *stand_in_notes(self._kernels),
            *self._remarks,
            *crossover_notes(self._samples, self._names, decision),
            *bound_notes(self._samples, decision, self._goal.slo),
            *batch_notes(self._samples, self._goal, self._requests(decision.variants)),
            *unused_notes(self._memory.saved(decision.variants)),
        ]
        return TuningResult(document, decision, times, notes)

    def _decide(self, names: Sequence[str]) -> Decision:
        if self._goal.slo is not None:
            return meet(self._samples, names, self._goal.slo)
        return optimise(self._samples, names, self._goal.objective, self._requests)

    def write(self, tuned: TuningResult) -> list[Path]:
        """Write the files, then delete the samples: if writing fails, the command can be run again."""
        files = write_files(self._output, tuned, f"{self._run['model']}: time of a pass")
        self._output.samples.unlink(missing_ok=True)
        return files

    @property
    def _names(self) -> list[str]:
        return list(self._variants)

    def _load_samples(self) -> Samples:
        try:
            return Samples.load(self._output.samples, self._run)
        except UsageError:
            if not self._output.overwrite:
                raise
            return Samples()

    def _save(self) -> None:
        self._samples.save(self._output.samples, self._run)

    def _beside_crossovers(self, phase: str) -> list[int]:
        """Return a size in the middle of each pair of measured sizes between which the variant changes."""
        decision = decide(
            self._samples, self._names, fastest(self._samples, self._names), relative_speed(self._samples)
        )
        brackets = [r.between for r in decision.ranges[phase] if r.between is not None]
        return [middle for bracket in brackets if (middle := between(*bracket)) is not None]

    def _requests(self, variants: Sequence[str]) -> int:
        """Return how many requests fit into the KV cache beside the weights of the variants."""
        token = read_model_shape(self._checkpoint.folder).kv_bytes_per_token
        return self._memory.requests(variants, self._goal.request_tokens * token)

    def _engine_options(self, variant: str) -> JsonObject:
        return {
            **self._grid.engine_options(self._max_length),
            "gpu_memory_utilization": self._memory.utilisation(variant),
            **self._serving,
        }
