# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Time servers under load: all subjects side by side, one under load at a time, in rounds.

Whatever drifts (clocks, temperature, neighbours) hits all subjects of a round alike, so rounds are compared
pairwise. Rounds go once forward and once backward through the subjects.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.speed.models import Model
from benchmarks.speed.results import Results
from benchmarks.speed.servers import MODEL_NAME, Server, ServerError, ServerOptions, ServerPool
from benchmarks.speed.subjects import FLEXQUANT, Subject
from benchmarks.speed.worker import Worker, WorkerError
from benchmarks.speed.workloads import Workload
from flexquant.errors import FlexQuantError

START = "start"
WARM_UP_TOKENS = 2


@dataclass(frozen=True)
class Cell:
    """One measurement: one workload, one subject, one round."""

    part: str
    workload: Workload
    round: int
    subject: Subject


def plan_cells(
    parts: dict[str, Sequence[Workload]], subjects: Sequence[Subject], rounds: int
) -> Iterator[Cell]:
    """Yield the cells in the order to measure them: whole rounds first, so that a part of them is of use."""
    for number in range(rounds):
        for part, workloads in parts.items():
            chosen = paired_subjects(subjects) if part == "overhead" else list(subjects)
            for workload in workloads:
                for subject in reversed(chosen) if number % 2 else chosen:
                    yield Cell(part, workload, number, subject)


def paired_subjects(subjects: Sequence[Subject]) -> list[Subject]:
    """Return the static checkpoints that are also served as FlexQuant's constant policy, each beside it."""
    by_name = {subject.name: subject for subject in subjects}
    pairs = [(s, by_name[FLEXQUANT + name]) for name, s in by_name.items() if FLEXQUANT + name in by_name]
    if not pairs:
        raise FlexQuantError(
            f"part 'overhead' compares e.g. w8a8 with flexquant:w8a8, but the subjects are "
            f"{', '.join(by_name)}; add such a pair to --subjects, or leave the part out"
        )
    return [subject for pair in pairs for subject in pair]


class ServingRun:
    """Starts what is needed for the cells that are not measured yet, and measures them."""

    def __init__(
        self,
        model: Model,
        results: Results,
        options: ServerOptions,
        logs: Path,
        *,
        on_gpu: bool,
        deadline: float,
        start_timeout: float,
        cell_timeout: float,
    ) -> None:
        """``deadline``: the time.monotonic() after which no cell is begun."""
        self.model, self.results, self.options, self.logs = model, results, options, logs
        self.on_gpu, self.deadline = on_gpu, deadline
        self.start_timeout, self.cell_timeout = start_timeout, cell_timeout
        self._warm: set[tuple[str, Workload]] = set()

    def measure(self, cells: Sequence[Cell]) -> int:
        """Measure the cells that are missing; return how many are left because time ran out."""
        missing = [cell for cell in cells if self.results.find(cell.part, self._parameters(cell)) is None]
        print(f"serving: {len(cells) - len(missing)} of {len(cells)} cells are there already", flush=True)
        subjects = list({cell.subject.name: cell.subject for cell in missing}.values())
        subjects = [subject for subject in subjects if self._can_run(subject)]
        if not subjects:
            return 0
        if time.monotonic() > self.deadline:
            return len(missing)
        folders = {subject.name: self.model.folder(subject) for subject in subjects}
        remaining = max(1.0, self.deadline - time.monotonic())
        # Memory is profiled while a server starts, so only servers with a fixed KV cache start together.
        together = 1 if self.options.kv_cache_gib is None else max(2, (os.cpu_count() or 1) // 4)
        client = Worker("benchmarks.speed.bench_client", self.logs / "bench_client.log")
        with ServerPool(together, min(self.start_timeout, remaining)) as pool:
            try:
                servers = self._start(pool, subjects, folders)
                todo = [cell for cell in missing if cell.subject.name in servers]
                for done, cell in enumerate(todo):
                    if time.monotonic() > self.deadline:
                        return len(todo) - done
                    print(f"[{done + 1}/{len(todo)}] {_line(cell)}: ", end="", flush=True)
                    self._measure(cell, servers[cell.subject.name], client, list(servers))
            finally:
                client.close()
        return 0

    def _can_run(self, subject: Subject) -> bool:
        if self.on_gpu or subject.cuda_only is None:
            return True
        self.results.save(START, self._start_parameters(subject), 0, failure=subject.cuda_only)
        print(f"{subject.name}: left out, {subject.cuda_only}", flush=True)
        return False

    def _start(
        self, pool: ServerPool, subjects: Sequence[Subject], folders: dict[str, Path]
    ) -> dict[str, Server]:
        makers = {
            subject.name: lambda subject=subject: Server(
                subject,
                folders[subject.name],
                self.options,
                self.on_gpu,
                self.logs / f"{subject.name.replace(':', '-').replace('/', '-')}.log",
            )
            for subject in subjects
        }
        print(f"starting {', '.join(makers)}", flush=True)
        servers: dict[str, Server] = {}
        for subject, (name, server, told) in zip(subjects, pool.start(makers), strict=True):
            parameters = self._start_parameters(subject)
            if server is None:
                self.results.save(START, parameters, self.start_timeout, failure=str(told))
                print(f"{name} failed to start: {told}", flush=True)
                continue
            assert not isinstance(told, ServerError)
            servers[name] = server
            print(f"{name} answers after {told['start_seconds']:.0f} s", flush=True)
            if self.results.find(START, parameters) is None:
                told["kv_cache_gib"] = self.options.kv_cache_gib
                if self.options.kv_cache_gib is None and "kv_cache_blocks" in told:
                    tokens = told["kv_cache_blocks"] * told["kv_cache_block_size"]
                    told["kv_cache_gib"] = tokens * self.model.shape.kv_bytes_per_token / 2**30
                told["checkpoint_gib"] = (
                    sum(f.stat().st_size for f in server.folder.glob("*.safetensors")) / 2**30
                )
                self.results.save(START, parameters, told["start_seconds"], result=told)
        return servers

    def _measure(self, cell: Cell, server: Server, client: Worker, side_by_side: list[str]) -> None:
        started = time.monotonic()
        try:
            if cell.workload.rate is None and (cell.subject.name, cell.workload) not in self._warm:
                self._warm.add((cell.subject.name, cell.workload))
                self._bench(replace(cell.workload, output=WARM_UP_TOKENS), -1, server, client)
            result = self._bench(cell.workload, cell.round, server, client)
        except WorkerError as e:
            self.results.save(cell.part, self._parameters(cell), time.monotonic() - started, failure=str(e))
            print(f"failed: {e}", flush=True)
            return
        result["side_by_side"] = side_by_side
        self.results.save(cell.part, self._parameters(cell), time.monotonic() - started, result=result)
        print(
            f"TTFT {result['median_ttft_ms']:.1f} ms, TPOT {result['median_tpot_ms']:.2f} ms, "
            f"{result['output_throughput']:.1f} tokens/s",
            flush=True,
        )

    def _bench(self, workload: Workload, number: int, server: Server, client: Worker) -> dict[str, Any]:
        arguments = workload.bench_arguments(server.url, MODEL_NAME, str(server.folder), number)
        return client.call(arguments, self.cell_timeout)

    def _parameters(self, cell: Cell) -> dict[str, Any]:
        return {
            "model": self.model.name,
            **cell.subject.describe(),
            "workload": cell.workload.describe(),
            "round": cell.round,
            "server": self.options.describe(),
        }

    def _start_parameters(self, subject: Subject) -> dict[str, Any]:
        return {
            "model": self.model.name,
            **subject.describe(),
            "server": self.options.describe(),
            "kv_cache_gib": self.options.kv_cache_gib,
            "memory_share": self.options.memory_share if self.on_gpu else None,
        }


def _line(cell: Cell) -> str:
    return f"{cell.part}, round {cell.round}, {cell.workload.name}, {cell.subject.name}"
