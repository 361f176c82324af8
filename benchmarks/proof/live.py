# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""One live server of a large model's shape, with dummy weights, takes policies one after another.

One server holds every variant once, so a shape fits that several servers side by side would not leave memory
for. It runs uncompiled, with FULL graphs of decode passes: compiling plans of 64 layers would take minutes,
and kernels and graphs decide what is compared. What does not start gives way, to what is smaller.

While the server starts, the client imports vLLM and tests may run; both are over before anything is timed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.proof.gpu import fitting, free_gib, kv_cache_gib, server_gib
from benchmarks.proof.steps import DONE, FAILED, OUT_OF_TIME, Outcome
from benchmarks.speed.models import open_model
from benchmarks.speed.results import ROOT
from benchmarks.speed.servers import Server, ServerError, ServerOptions
from benchmarks.speed.shapes import SHAPES
from benchmarks.speed.subjects import FLEXQUANT, parse_subject
from benchmarks.speed.workloads import Workload
from examples.vllm_server import ProcessGroup, end_of_log
from flexquant.serving.frontend.client import ADMIN_KEY

VARIANTS = ("w8a8", "w4a16")
CANDIDATES = ("qwen2.5-32b", "qwen2.5-32b-32layers", "llama-3.1-8b", "1.5b", "small")
"""Shapes, the wanted one first; the next one is taken where the memory ends."""
WORKLOADS = (Workload(6, 128, 6, at_once=1), Workload(3, 2048, 4, at_once=1), Workload(32, 512, 32))
MINIATURE = (Workload(3, 64, 3, at_once=1), Workload(2, 64, 4))
SIZES = (1, 2, 4, 8, 16, 32)
ROUNDS = ("--rounds", "5", "--max-rounds", "5")
START_SHARE = 0.65
"""Share of the time that the server gets to start."""
TESTS_GIB = 12
"""GiB of the GPU that tests beside a server may take."""
TESTS_SECONDS = 40.0
"""Most seconds that a started server waits for the tests beside it."""
STOP_SECONDS = 5.0
"""Seconds in which a process has to end before it is killed."""
LONGEST_REASON = 600
"""Most characters of why a server failed; its log says more."""
GROUPS = "live.pids"
"""File with the process groups of the server and its client while they run, as `kill` takes them."""


class Lineup(NamedTuple):
    """Policies to compare on one server."""

    policies: tuple[str, ...]
    """Names or files; the first one is what the others are compared with."""
    start: str
    """The policy that the server starts with, which uses the variants of all the others."""
    bytes_a_weight: float
    kernels: dict[str, str] = {}  # noqa: RUF012 - nobody changes it
    """Variant -> family of kernels that it is to have, rather than FlexQuant's choice."""


FILES = ROOT / "benchmarks" / "policies"
W4A8 = str(FILES / "w4a8-fp8.yaml")
PLAIN = Lineup(("w8a8", "w4a16", "phase-batch"), "phase-batch", 1.55)
LINEUPS = (
    Lineup(("w8a8", "w4a16", "one-copy", W4A8, "phase-batch"), str(FILES / "reach-w4a8.yaml"), 2.1),
    Lineup(("w8a8", "w4a16", "one-copy", "phase-batch"), str(FILES / "reach-one-copy.yaml"), 1.55),
    PLAIN,
)
"""What is to be compared, the wanted one first."""
VLLMS_CHOICE = Lineup(VARIANTS, "phase-batch", 1.55, {"w4a16": "machete"})
"""W4A16 as stock vLLM multiplies it on Hopper; one copy would need Marlin's layout."""

Tries = Sequence[tuple[str, Lineup]]
"""Shapes and what to compare on them, in the order in which they are tried."""


def tries(free: float) -> Tries:
    """Return what to try in ``free`` GiB: W4A8 gives way first, then one copy, then the shape."""
    tokens = max(workload.most_at_once * workload.longest for workload in WORKLOADS)
    shapes = fitting(CANDIDATES, free, PLAIN.bytes_a_weight, tokens)
    fit = [
        (shape, lineup)
        for shape in shapes[:1]
        for lineup in LINEUPS
        if fitting([shape], free, lineup.bytes_a_weight, tokens)
    ]
    return [*fit, *((shape, PLAIN) for shape in shapes[1:])]


def compare_on_a_large_shape(
    output: Path, work: Path, on_gpu: bool, seconds: float, start_tests: Callable[[], ProcessGroup]
) -> Outcome:
    """Compare the first of :func:`tries` that starts.

    The tests run beside the server as it starts, if the GPU has memory for both, and end before it is timed.
    """
    with contextlib.ExitStack() as stack:
        tests = None
        if on_gpu:
            found = tries(free := free_gib())
            if not found:
                return Outcome(FAILED, f"{free:.1f} GiB of free memory hold none of {', '.join(CANDIDATES)}")
            shape, lineup = found[0]
            has_room = free - server_gib(SHAPES[shape], lineup.bytes_a_weight, cache_gib(shape)) > TESTS_GIB
        else:
            found, has_room = [("tiny", lineup) for lineup in LINEUPS], True
        if has_room:
            tests = start_tests()
            stack.callback(tests.stop, STOP_SECONDS)
        return compare_first(found, output, work, on_gpu, seconds, tests)


def compare_by_vllms_choice(output: Path, shape: str, work: Path, on_gpu: bool, seconds: float) -> Outcome:
    """Compare W8A8 and W4A16 on a server of ``shape`` whose W4A16 has the kernel that stock vLLM takes."""
    left_to_vllm = VLLMS_CHOICE._replace(kernels={})
    found = [VLLMS_CHOICE, left_to_vllm] if on_gpu else [left_to_vllm]
    return compare_first([(shape, lineup) for lineup in found], output, work, on_gpu, seconds)


def compare_first(
    tries: Tries, output: Path, work: Path, on_gpu: bool, seconds: float, tests: ProcessGroup | None = None
) -> Outcome:
    """Compare the first that does not fail, within ``seconds``; the note says what failed before."""
    until = time.monotonic() + seconds
    notes: list[str] = []
    found = Outcome(OUT_OF_TIME)
    for shape, lineup in tries:
        if (left := until - time.monotonic()) < (60 if notes else 0):
            break
        found = compare(shape, lineup, output, work, on_gpu, left, tests)
        names = ", ".join(Path(policy).stem for policy in lineup.policies)
        kernels = "".join(f", {variant} by {family}" for variant, family in lineup.kernels.items())
        failed = f"failed: {' '.join(found.note.split())[-LONGEST_REASON:]}"
        said = failed if found.state == FAILED else "FULL graphs" if on_gpu else "eager"
        notes.append(f"{shape}: {SHAPES[shape].layers} layers, dummy weights, {names}{kernels}, {said}")
        if found.state != FAILED:
            break
    return found._replace(note="; ".join(notes))


def compare(
    shape: str,
    lineup: Lineup,
    output: Path,
    work: Path,
    on_gpu: bool,
    seconds: float,
    tests: ProcessGroup | None = None,
) -> Outcome:
    """Compare policies on one server of a shape, after the ``tests`` beside it have ended."""
    began = time.monotonic()
    folder = open_model([shape], work).without_weights(VARIANTS)
    key = secrets.token_hex(8)
    options = {"policy": lineup.start, **({"kernels": lineup.kernels} if lineup.kernels else {})}
    subject = replace(
        parse_subject(f"{FLEXQUANT}{lineup.start}"),
        arguments=("--additional-config", json.dumps({"flexquant": options})),
        environment={"VLLM_PLUGINS": "flexquant", ADMIN_KEY: key},
    )
    logs = work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    gate, groups = logs.absolute() / "live.gate", output.with_name(GROUPS)
    gate.unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        log = logs / f"live-{shape}-{len(lineup.policies)}-policies.log"
        server = Server(subject, folder, server_options(shape, lineup, on_gpu), on_gpu, log)
        stack.callback(groups.unlink, missing_ok=True)
        stack.callback(server.processes.stop, STOP_SECONDS)
        client = start_client(server.url, lineup.policies, output, on_gpu, gate, logs, key)
        stack.callback(client.stop, STOP_SECONDS)
        groups.write_text(f"-{server.processes.pid} -{client.pid}\n", encoding="utf-8")
        try:
            told = server.wait_until_ready(seconds * START_SHARE)
        except ServerError as e:
            return Outcome(FAILED, str(e))
        print(f"   {shape} is ready: {told}", flush=True)
        if tests is not None:
            wait_for(tests, min(began + seconds * START_SHARE, time.monotonic() + TESTS_SECONDS))
            tests.stop(STOP_SECONDS)
        gate.touch()
        code = wait_for(client, began + seconds - 2 * STOP_SECONDS)
    if code is None:
        return Outcome(OUT_OF_TIME)
    return Outcome(DONE) if code == 0 else Outcome(FAILED, end_of_log(client_log(logs), 5))


def client_log(logs: Path) -> Path:
    return logs / "live-client.log"


def start_client(
    url: str, policies: Sequence[str], output: Path, on_gpu: bool, gate: Path, logs: Path, key: str
) -> ProcessGroup:
    """Start `benchmarks policies`, which waits for the file ``gate`` once it has imported vLLM."""
    command = [sys.executable, "-m", "benchmarks", "policies", url, "--gate", str(gate)]
    command += [part for policy in policies for part in ("--policy", policy)]
    command += ["--serving", *(workload.name for workload in (WORKLOADS if on_gpu else MINIATURE))]
    command += [*(ROUNDS if on_gpu else ("--rounds", "1")), "--output", str(output.absolute())]
    return ProcessGroup(command, client_log(logs), {**os.environ, ADMIN_KEY: key}, ROOT)


def wait_for(process: ProcessGroup, until: float) -> int | None:
    """Return the exit code of a process; None if it still runs at ``until``, s of the monotonic clock."""
    while (code := process.exit_code()) is None and time.monotonic() < until:
        time.sleep(0.1)
    return code


def cache_gib(shape: str, workloads: Sequence[Workload] = WORKLOADS) -> float:
    return max(1.0, kv_cache_gib(SHAPES[shape], max(w.most_at_once * w.longest for w in workloads)))


def server_options(shape: str, lineup: Lineup, on_gpu: bool) -> ServerOptions:
    """Return how to serve a shape with dummy weights, within the memory that it needs."""
    import torch

    extra = ["--load-format", "dummy"]
    workloads = WORKLOADS if on_gpu else MINIATURE
    cache, share = cache_gib(shape, workloads), 0.9
    if on_gpu:
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": list(SIZES)}
        extra += ["--compilation-config", json.dumps(graphs)]
        total = torch.cuda.get_device_properties(0).total_memory / 2**30
        share = min(0.97, server_gib(SHAPES[shape], lineup.bytes_a_weight, cache) / total)
    return ServerOptions(
        max_length=max(workload.longest for workload in workloads),
        max_sequences=max(SIZES),
        eager=not on_gpu,
        kv_cache_gib=cache,
        memory_share=share,
        extra=tuple(extra),
    )
