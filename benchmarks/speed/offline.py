# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""``vllm bench latency`` and ``vllm bench throughput``, once for every subject, one after the other."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.speed.models import Model
from benchmarks.speed.results import Results, end_of_log
from benchmarks.speed.servers import ServerOptions
from benchmarks.speed.subjects import Subject
from benchmarks.speed.workloads import Workload

OFFLINE = "offline"


def measure_offline(
    model: Model,
    results: Results,
    subjects: Sequence[Subject],
    batch: Workload,
    options: ServerOptions,
    *,
    on_gpu: bool,
    iterations: int,
    deadline: float,
    timeout: float,
) -> int:
    """Measure what is missing; return how many cells are left because time ran out."""
    cells = [(subject, kind) for kind in ("latency", "throughput") for subject in subjects]
    for done, (subject, kind) in enumerate(cells):
        parameters = {
            "model": model.name,
            **subject.describe(),
            "kind": kind,
            "workload": batch.describe(),
            "iterations": iterations,
            "server": options.describe(),
        }
        if results.find(OFFLINE, parameters) is not None:
            continue
        if not on_gpu and subject.cuda_only is not None:
            results.save(OFFLINE, parameters, 0, failure=subject.cuda_only)
            continue
        if time.monotonic() > deadline:
            return len(cells) - done
        print(f"[{done + 1}/{len(cells)}] vllm bench {kind}, {subject.name}: ", end="", flush=True)
        arguments = bench_arguments(kind, batch, iterations)
        arguments += ["--model", str(model.folder(subject)), *options.engine_arguments(subject, on_gpu)]
        started = time.monotonic()
        outcome = run_bench(kind, arguments, options.environment(subject), timeout)
        results.save(OFFLINE, parameters, time.monotonic() - started, **outcome)
        print("failed" if "failure" in outcome else "done", flush=True)
    return 0


def bench_arguments(kind: str, batch: Workload, iterations: int) -> list[str]:
    """Return the arguments of ``vllm bench latency`` or ``throughput`` for a batch of requests."""
    lengths = ["--input-len", str(batch.input), "--output-len", str(batch.output)]
    if kind == "latency":
        counts = ["--num-iters-warmup", "1", "--num-iters", str(iterations)]
        return [*lengths, "--batch-size", str(batch.requests), *counts]
    return [*lengths, "--dataset-name", "random", "--num-prompts", str(batch.requests * iterations)]


def run_bench(
    kind: str, arguments: Sequence[str], environment: dict[str, str], timeout: float
) -> dict[str, Any]:
    """Return ``{"result": ...}``, or ``{"failure": ...}`` with the end of the output."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", kind, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder) / "result.json", Path(folder) / "log"
        try:
            with open(log, "w") as out:
                done = subprocess.run(
                    [*command, "--output-json", str(output)],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    timeout=timeout,
                )
            ended = f"ended with code {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"took longer than {timeout:.0f} s"
        if output.is_file():
            return {"result": json.loads(output.read_text(encoding="utf-8"))}
        text = log.read_text(encoding="utf-8", errors="replace")
        return {"failure": f"vllm bench {kind} {ended}; its output ends:\n{end_of_log(text)}"}
