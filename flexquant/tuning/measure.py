# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Measure the variants: an engine for each, and rounds of passes until their times decide.

All that later steps need of a run is here: its samples, its kernels, its memory and where it was made.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from flexquant.checkpoint.built_model import language_config
from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint, folder_label, weights_identity
from flexquant.checkpoint.model_config import JsonObject, count_layers
from flexquant.checkpoint.weight_bytes import stored_head_remark
from flexquant.doctor.examining import count_bytes
from flexquant.errors import UsageError
from flexquant.evaluation.comparison import Effort
from flexquant.evaluation.engine import describe_machine, describe_versions
from flexquant.evaluation.workers import Worker, start_workers
from flexquant.policy.routes import build_route_table
from flexquant.policy.rules import Policy, parse_policy
from flexquant.tuning.candidates import Memory
from flexquant.tuning.samples import Grid, Samples, check_decidable, wide

Bar = Callable[..., AbstractContextManager[Callable[[int, int], None]]]


def measure_rounds(
    samples: Samples,
    names: Sequence[str],
    passes: Sequence[tuple[str, int]],
    effort: Effort,
    time: Callable[[str, str, int], float],
    done: Callable[[int, int], None],
) -> None:
    """Measure what the samples lack of ``passes``, each a phase and a size; the variants take turns.

    Rounds are added, up to the most, for the passes with a ratio that is not as narrow as it should be.
    ``time(name, phase, size)`` measures; ``done`` gets after every pass how many there were and are planned.
    """

    def lacking(number: int, passes: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Return the passes that some variant has no sample of in round ``number``."""
        return [one for one in passes if min(samples.count(name, *one) for name in names) <= number]

    count, planned = 0, sum(len(lacking(number, passes)) for number in range(effort.rounds))
    for number in range(effort.max_rounds):
        missing = lacking(number, passes if number < effort.rounds else wide(samples, names, effort.width))
        planned += len(missing) if number >= effort.rounds else 0
        for phase, size in missing:
            for name in names[:: -1 if number % 2 else 1]:
                samples.add(name, phase, size, time(name, phase, size))
            count += 1
            done(count, planned)


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
        request_tokens: int | None = None,
    ) -> None:
        """Check the inputs, and load the samples of an interrupted run from ``file``.

        ``variants`` maps each variant, the most precise first, to the policy that runs every pass in it.
        ``request_tokens``: of a request of :meth:`requests`, if it is asked. Raises FlexQuantError for a
        folder that is no merged checkpoint, and for samples of another run unless ``overwrite`` is set.
        """
        self._checkpoint = MergedCheckpoint.open(folder, published=True)
        self.variants = variants
        config = language_config(self._checkpoint.config, folder)
        self.grid = grid.fitting(getattr(config, "max_position_embeddings", None))
        self.memory = Memory.of(self._checkpoint, variants, tensor_parallel_size)
        self._request_bytes = 0
        if request_tokens is not None:
            any_policy = next(iter(variants.values())).document
            of_rank = count_bytes(folder, any_policy, tensor_parallel_size).request_bytes(request_tokens)
            self._request_bytes = of_rank * tensor_parallel_size
        self._serving = {"tensor_parallel_size": tensor_parallel_size, "enforce_eager": enforce_eager}
        self.run = {
            "model": folder_label(folder),
            "variants": {name: policy.document for name, policy in variants.items()},
            "files": weights_identity(folder),
            "context": self.grid.context,
            "limits": self.grid.engine_options(),
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
        """Measure and save what samples lack; raise FlexQuantError if an engine fails or times are noisy."""
        grid = self.grid
        with ExitStack() as stack:

            @functools.cache
            def workers() -> Mapping[str, Worker]:
                progress(f"starting {', '.join(self.variants)}")
                starting = start_workers(self.variants, self._checkpoint.folder, self._engine_options)
                started = stack.enter_context(starting)
                self.kernels = {name: worker.kernels for name, worker in started.items()}
                return started

            def time(name: str, phase: str, size: int) -> float:
                context = (grid.context,) if phase == "decode" else ()
                return workers()[name].call(phase, size, *context, grid.seconds)

            def done(count: int, planned: int) -> None:
                show(count, planned)
                self._save()

            show = stack.enter_context(bar("measuring", unit="size"))
            measure_rounds(self.samples, self.names, grid.passes, grid.effort, time, done)
        try:
            check_decidable(self.samples, self.names)
        finally:
            self._save()

    def requests(self, variants: Sequence[str]) -> int:
        """Return how many requests fit beside the weights of the variants, on all devices."""
        return self.memory.requests(variants, self._request_bytes)

    def head_remark(self, policy: JsonObject) -> str:
        """Return what an lm_head in INT8 would gain a policy's decode steps; empty for little."""
        stored = self._checkpoint
        variants, num_layers = list(stored.merged.variants), count_layers(stored.config)
        routes = build_route_table(parse_policy(policy, "tuned"), variants, num_layers, 1)
        decodes = routes.source(routes.lookup("decode", 1).layers[-1])
        return stored_head_remark(stored.variant_tensors(decodes))

    def discard_samples(self) -> None:
        """Delete the samples' file, once what follows from them is written."""
        self._file.unlink(missing_ok=True)

    def _save(self) -> None:
        self.samples.save(self._file, self.run)

    def _engine_options(self, variant: str) -> JsonObject:
        share = {"gpu_memory_utilization": self.memory.utilisation(variant)}
        return self.grid.engine_options() | share | self._serving
