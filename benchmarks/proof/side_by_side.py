# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The servers that a proof starts side by side, as many as the GPU holds, and what they are asked."""

from __future__ import annotations

from benchmarks.proof.gpu import USABLE, free_gib, kv_cache_gib, server_gib
from benchmarks.speed.models import Model
from benchmarks.speed.shapes import Shape
from benchmarks.speed.subjects import AGAIN
from benchmarks.speed.workloads import Workload

SERVING = [
    Workload(30, 128, 16, at_once=1),
    Workload(32, 512, 64),
    Workload(24, 512, 64, rate=16, spread=0.5),
]
OVERHEAD = SERVING[:1]
MINIATURE = [Workload(30, 16, 2, at_once=1), Workload(2, 32, 4)]
SUBJECTS = {
    "w8a8": 1.0,
    "w4a16": 0.55,
    "flexquant:phase-batch": 1.55,
    f"w8a8{AGAIN}": 1.0,
    f"w4a16{AGAIN}": 0.55,
    "flexquant:w8a8": 1.0,
    "flexquant:one-copy": 0.6,
    "bf16": 2.0,
}
"""Subjects that are served side by side, the most valuable first -> their bytes a weight."""
MINIATURE_SUBJECTS = ["w8a8", f"w8a8{AGAIN}", "flexquant:w8a8"]


def serving_options(model: Model, on_gpu: bool) -> list[str]:
    """Return the arguments of the serving step: as many subjects as the GPU has memory for."""
    workloads = SERVING if on_gpu else MINIATURE
    cache = max(1.0, kv_cache_gib(model.shape, most_tokens(workloads)))
    subjects = fitting_subjects(model.shape, cache, free_gib()) if on_gpu else MINIATURE_SUBJECTS
    paired = "flexquant:w8a8" in subjects
    return [
        *("--parts", "serving,overhead" if paired else "serving"),
        *("--subjects", ",".join(subjects)),
        *(("--rounds", "6", "--max-rounds", "20") if on_gpu else ("--rounds", "1")),
        *("--serving", *(workload.name for workload in workloads)),
        *("--overhead", *(workload.name for workload in (OVERHEAD if on_gpu else MINIATURE[:1]))),
        *("--kv-cache-gib", f"{cache:.2f}"),
    ]


def most_tokens(workloads: list[Workload]) -> int:
    """Return the most tokens that the requests of a workload have together, all at once."""
    return max(workload.most_at_once * workload.longest for workload in workloads)


def fitting_subjects(shape: Shape, cache: float, free: float) -> list[str]:
    """Return the subjects that fit into ``free`` GiB side by side, the most valuable ones first."""
    free *= USABLE
    found = []
    for subject, bytes_a_weight in SUBJECTS.items():
        needed = server_gib(shape, bytes_a_weight, cache)
        if needed <= free:
            free -= needed
            found.append(subject)
    return found
