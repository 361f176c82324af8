# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""One live server of a large model's shape, with dummy weights, takes policies one after another.

One server holds both variants once, so a shape fits that several servers side by side would not leave memory
for. It runs uncompiled, with FULL graphs of decode passes: compiling two plans of 64 layers would take
minutes, and kernels and graphs decide what is compared.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.proof.gpu import fitting, free_gib, kv_cache_gib, server_gib
from benchmarks.proof.steps import FAILED, LOG, Outcome, run_bounded
from benchmarks.speed.models import open_model
from benchmarks.speed.servers import Server, ServerError, ServerOptions
from benchmarks.speed.shapes import SHAPES
from benchmarks.speed.subjects import parse_subject
from benchmarks.speed.workloads import Workload
from flexquant.serving.frontend.client import ADMIN_KEY

POLICIES = ("w8a8", "w4a16", "phase-batch")
"""The first one is what the others are compared with; the last one uses the layers of all."""
VARIANTS = ("w8a8", "w4a16")
BYTES_A_WEIGHT = 1.55
CANDIDATES = ("qwen2.5-32b", "qwen2.5-32b-32layers", "llama-3.1-8b", "1.5b", "small")
"""Shapes, the wanted one first; the next one is taken where the memory ends."""
WORKLOADS = (Workload(30, 128, 4, at_once=1), Workload(32, 512, 32))
MINIATURE = (Workload(30, 16, 2, at_once=1), Workload(2, 32, 4))
SIZES = (1, 2, 4, 8, 16, 32)
ROUNDS = ("--rounds", "5", "--max-rounds", "8")
START_SHARE = 0.6
"""Share of the time that the server gets to start."""


def compare_on_a_large_shape(output: Path, work: Path, on_gpu: bool, seconds: float) -> Outcome:
    """Compare POLICIES on one server; a shape that does not start gives way to the next one."""
    began = time.monotonic()
    if not on_gpu:
        return compare("tiny", MINIATURE, ("--rounds", "1"), output, work, False, seconds)
    tokens = max(workload.most_at_once * workload.longest for workload in WORKLOADS)
    free = free_gib()
    shapes = fitting(CANDIDATES, free, BYTES_A_WEIGHT, tokens)
    notes = [f"{name} left out: {free:.0f} GiB are free" for name in CANDIDATES if name not in shapes]
    found = Outcome(FAILED, f"{free:.1f} GiB of free memory hold none of {', '.join(CANDIDATES)}")
    for name in shapes:
        left = seconds - (time.monotonic() - began)
        found = compare(name, WORKLOADS, ROUNDS, output, work, True, left)
        if found.state != FAILED or left < seconds / 2:
            break
        notes.append(f"{name} did not start: {found.note}")
    return found._replace(note="; ".join([*notes, found.note]))


def compare(
    name: str,
    workloads: tuple[Workload, ...],
    rounds: tuple[str, ...],
    output: Path,
    work: Path,
    on_gpu: bool,
    seconds: float,
) -> Outcome:
    """Compare POLICIES on a server of one shape."""
    began = time.monotonic()
    folder = open_model([name], work).without_weights(VARIANTS)
    key = secrets.token_hex(8)
    subject = parse_subject(f"flexquant:{POLICIES[-1]}")
    subject = replace(subject, environment={"VLLM_PLUGINS": "flexquant", ADMIN_KEY: key})
    logs = work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    server = Server(subject, folder, server_options(name, workloads, on_gpu), on_gpu, logs / "live.log")
    try:
        server.wait_until_ready(seconds * START_SHARE)
        command = [sys.executable, "-m", "benchmarks", "policies", server.url]
        command += [part for policy in POLICIES for part in ("--policy", policy)]
        command += ["--serving", *(workload.name for workload in workloads), *rounds]
        command += ["--output", str(output.absolute())]
        left = seconds - (time.monotonic() - began)
        found = run_bounded(command, left, {**os.environ, ADMIN_KEY: key}, output.with_name(LOG))
    except ServerError as e:
        return Outcome(FAILED, str(e))
    finally:
        server.stop()
    note = f"{name}: {SHAPES[name].layers} layers, dummy weights, " + ("FULL graphs" if on_gpu else "eager")
    return found._replace(note="; ".join(filter(None, [note, found.note])))


def server_options(name: str, workloads: tuple[Workload, ...], on_gpu: bool) -> ServerOptions:
    """Return how to serve a shape with dummy weights, within the memory that it needs."""
    import torch

    shape, extra = SHAPES[name], ["--load-format", "dummy"]
    cache = max(1.0, kv_cache_gib(shape, max(w.most_at_once * w.longest for w in workloads)))
    share = 0.9
    if on_gpu:
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": list(SIZES)}
        extra += ["--compilation-config", json.dumps(graphs)]
        total = torch.cuda.get_device_properties(0).total_memory / 2**30
        share = min(0.97, server_gib(shape, BYTES_A_WEIGHT, cache) / total)
    return ServerOptions(
        max_length=max(workload.longest for workload in workloads),
        max_sequences=max(SIZES),
        eager=not on_gpu,
        kv_cache_gib=cache,
        memory_share=share,
        extra=tuple(extra),
    )
