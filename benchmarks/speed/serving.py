# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Time servers under load: all subjects side by side, one under load at a time, in rounds.

Whatever drifts (clocks, temperature, neighbours) hits all subjects of a round alike, so rounds are compared
pairwise.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.speed.bench_client import AS_IDS
from benchmarks.speed.comparing import Rounds
from benchmarks.speed.kernels import has_stock_w4a8
from benchmarks.speed.models import Model
from benchmarks.speed.peers import PeerServer, check_peer, make_gguf
from benchmarks.speed.results import Results
from benchmarks.speed.rounds import Cell, Plan
from benchmarks.speed.servers import MODEL_NAME, Server, ServerError, ServerOptions, ServerPool
from benchmarks.speed.subjects import Subject
from benchmarks.speed.worker import Worker, WorkerError
from benchmarks.speed.workloads import Workload

START, SERVING = "start", "serving"
WARM_UP_TOKENS = 2
PRESSURE = Path("/proc/pressure/memory")
STALLED = "memory_stalled_seconds"
"""Key in a measurement's result: the seconds for which all programs waited for memory."""
TOO_LONG = 0.01
"""Share of a measurement's time; one that waited for longer counts as disturbed."""
WAKE_UP = Workload(1, 16, WARM_UP_TOKENS)
"""Requests before every cell: the system may have taken memory back from a server that was idle meanwhile."""


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
        """``deadline`` is the time.monotonic() after which no cell is begun."""
        self.model, self.results, self.options, self.logs = model, results, options, logs
        self.on_gpu, self.deadline = on_gpu, deadline
        self.start_timeout, self.cell_timeout = start_timeout, cell_timeout
        self._warm: set[tuple[str, Workload]] = set()
        self._servers: dict[str, Server] = {}
        """Servers, keyed by the name of their subject."""
        self._left_out: set[str] = set()
        """The names of the subjects that cannot run or did not start."""
        self._described: dict[str, dict[str, Any]] = {}

    def measure(self, plan: Plan) -> int:
        """Measure what the plan lacks; return how many cells are known to be left because time ran out."""
        missing = self._missing(plan.first)
        count = len(plan.first)
        print(f"serving: {count - len(missing)} of {count} cells are there already", flush=True)
        # Memory is profiled while a server starts, so only servers with a fixed KV cache start together.
        together = 1 if self.options.kv_cache_gib is None else max(2, (os.cpu_count() or 1) // 4)
        remaining = max(1.0, self.deadline - time.monotonic())
        client = Worker("benchmarks.speed.bench_client", self.logs / "bench_client.log")
        with ServerPool(together, min(self.start_timeout, remaining)) as pool:
            try:
                if left := self._measure_all(missing, pool, client):
                    return left
                for cells in plan.added(lambda workload: self._rounds(plan, workload)):
                    if left := self._measure_all(self._missing(cells), pool, client):
                        return left
            finally:
                client.close()
        return 0

    def _missing(self, cells: Sequence[Cell]) -> list[Cell]:
        return [cell for cell in cells if self.results.find(SERVING, self._parameters(cell)) is None]

    def _rounds(self, plan: Plan, workload: Workload) -> dict[str, Rounds]:
        """Return the rounds that a workload has, by the names of the subjects that can be measured."""
        found: dict[str, Rounds] = {}
        for number in range(plan.effort.max_rounds):
            for cell in plan.cells(workload, number):
                there = self.results.find(SERVING, self._parameters(cell))
                if there and cell.subject.name not in self._left_out:
                    found.setdefault(cell.subject.name, {})[number] = there["result"]
        return found

    def _measure_all(self, cells: Sequence[Cell], pool: ServerPool, client: Worker) -> int:
        """Measure cells, on servers that are started when first needed; return how many are left."""
        subjects = {cell.subject.name: cell.subject for cell in cells}
        known = self._servers.keys() | self._left_out
        new = [s for name, s in subjects.items() if name not in known and self._can_run(s)]
        todo = [cell for cell in cells if cell.subject.name not in self._left_out]
        if todo and time.monotonic() > self.deadline:
            return len(todo)
        if new:
            self._start(pool, new)
        todo = [cell for cell in todo if cell.subject.name in self._servers]
        for done, cell in enumerate(todo):
            if time.monotonic() > self.deadline:
                return len(todo) - done
            print(f"[{done + 1}/{len(todo)}] {_line(cell)}: ", end="", flush=True)
            self._measure(cell, self._servers[cell.subject.name], client)
        return 0

    def _can_run(self, subject: Subject) -> bool:
        if self.on_gpu or not subject.needs_w4a8 or has_stock_w4a8():
            return True
        problem = "vLLM has no W4A8 on this CPU (it needs AMX, or zentorch on Zen 4 and later)"
        self._left_out.add(subject.name)
        self.results.save(START, self._start_parameters(subject), 0, failure=problem)
        print(f"{subject.name}: left out, {problem}", flush=True)
        return False

    def _start(self, pool: ServerPool, subjects: Sequence[Subject]) -> None:
        makers = {subject.name: self._maker(subject) for subject in subjects}
        print(f"starting {', '.join(makers)}", flush=True)
        for subject, (name, server, told) in zip(subjects, pool.start(makers), strict=True):
            parameters = self._start_parameters(subject)
            if server is None:
                self._left_out.add(name)
                self.results.save(START, parameters, self.start_timeout, failure=str(told))
                print(f"{name} failed to start: {told}", flush=True)
                continue
            assert not isinstance(told, ServerError)
            self._servers[name] = server
            print(f"{name} answers after {told['start_seconds']:.0f} s", flush=True)
            if self.results.find(START, parameters) is None:
                told["kv_cache_gib"] = self.options.kv_cache_gib
                if self.options.kv_cache_gib is None and "kv_cache_blocks" in told:
                    tokens = told["kv_cache_blocks"] * told["kv_cache_block_size"]
                    told["kv_cache_gib"] = tokens * self.model.shape.kv_bytes_per_token / 2**30
                told["checkpoint_gib"] = server.checkpoint_bytes / 2**30
                self.results.save(START, parameters, told["start_seconds"], result=told)

    def _maker(self, subject: Subject) -> Callable[[], Server]:
        """Return what starts a subject's server; make its checkpoint if that is missing."""
        folder = self.model.folder(subject)
        log = self.logs / f"{subject.name.replace(':', '-').replace('/', '-')}.log"
        if subject.peer is None:
            return lambda: Server(subject, folder, self.options, self.on_gpu, log)
        file = make_gguf(folder, subject, self.model.work / self.model.name / "gguf")
        return lambda: PeerServer(subject, folder, file, self.model.shape, self.options, log)

    def _measure(self, cell: Cell, server: Server, client: Worker) -> None:
        started = time.monotonic()
        try:
            if cell.workload.rate is None and (cell.subject.name, cell.workload) not in self._warm:
                self._warm.add((cell.subject.name, cell.workload))
                self._bench(replace(cell.workload, output=WARM_UP_TOKENS), -1, server, client)
            else:
                self._bench(WAKE_UP, -1, server, client)
            stalled = stalled_seconds()
            result = self._bench(cell.workload, cell.round, server, client)
            result[STALLED] = round(stalled_seconds() - stalled, 3)
        except WorkerError as e:
            self.results.save(SERVING, self._parameters(cell), time.monotonic() - started, failure=str(e))
            print(f"failed: {e}", flush=True)
            return
        result["side_by_side"] = list(self._servers)
        self.results.save(SERVING, self._parameters(cell), time.monotonic() - started, result=result)
        print(
            f"TTFT {result['median_ttft_ms']:.1f} ms, TPOT {result['median_tpot_ms']:.2f} ms, "
            f"{result['output_throughput']:.1f} tokens/s",
            flush=True,
        )

    def _bench(self, workload: Workload, number: int, server: Server, client: Worker) -> dict[str, Any]:
        arguments = workload.bench_arguments(server.url, MODEL_NAME, str(server.folder), number)
        if isinstance(server, PeerServer):
            arguments.append(AS_IDS)
        return client.call(arguments, self.cell_timeout)

    def _describe(self, subject: Subject) -> dict[str, Any]:
        if subject.name not in self._described:
            described = {"model": self.model.name, **subject.describe()}
            if subject.peer is not None:
                described["peer"] = check_peer(subject, self.on_gpu)
            self._described[subject.name] = described
        return self._described[subject.name]

    def _parameters(self, cell: Cell) -> dict[str, Any]:
        return {
            **self._describe(cell.subject),
            "workload": cell.workload.describe(),
            "round": cell.round,
            "server": self.options.describe(),
        }

    def _start_parameters(self, subject: Subject) -> dict[str, Any]:
        return {
            **self._describe(subject),
            "server": self.options.describe(),
            "kv_cache_gib": self.options.kv_cache_gib,
            "memory_share": self.options.memory_share if self.on_gpu else None,
        }


def _line(cell: Cell) -> str:
    return f"round {cell.round}, {cell.workload.name}, {cell.subject.name}"


def stalled_seconds(file: Path = PRESSURE) -> float:
    """Return for how long all programs at once have waited for memory; 0 where the system does not tell.

    The time is the total of the line "full" in Linux's pressure stall information.
    """
    if not file.is_file():
        return 0.0
    found = re.search(r"^full .*total=(\d+)", file.read_text(), re.MULTILINE)
    return int(found[1]) / 1e6 if found else 0.0


def short_of_memory(results: Sequence[dict[str, Any]]) -> str:
    """Return how many of the measurements were disturbed, in a sentence; empty if none was."""
    disturbed = sum(result.get(STALLED, 0.0) > TOO_LONG * result["duration"] for result in results)
    if not disturbed:
        return ""
    return (
        f"In {disturbed} of {len(results)} measurements all programs waited for memory for more than "
        f"{TOO_LONG:.0%} of the time: take fewer subjects at once."
    )
