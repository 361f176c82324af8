# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The GPU of a proof: whether its driver suits this PyTorch, and which shapes and servers it holds."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterable

from benchmarks.speed.models import Model
from benchmarks.speed.shapes import SHAPES, Shape
from benchmarks.speed.subjects import AGAIN
from benchmarks.speed.workloads import Workload

SERVER_GIB = 2.5
"""GiB that a server takes beside weights and KV cache: activations, CUDA graphs, CUDA itself."""
USABLE = 0.95
"""Share of the free memory that may be planned for."""
FREE_MEMORY = "import torch; print(torch.cuda.mem_get_info()[0])"
SERVING = [
    Workload(30, 128, 16, at_once=1),
    Workload(32, 512, 64),
    Workload(24, 512, 64, rate=16, spread=0.5),
]
MINIATURE = [Workload(30, 16, 2, at_once=1), Workload(2, 32, 4)]
SUBJECTS = {
    "w8a8": 1.0,
    "w4a16": 0.55,
    "flexquant:phase-batch": 1.55,
    f"w8a8{AGAIN}": 1.0,
    f"w4a16{AGAIN}": 0.55,
    "flexquant:one-copy": 0.6,
    "bf16": 2.0,
}
"""Subjects that are served side by side, the most valuable first -> their bytes a weight."""
MINIATURE_SUBJECTS = ["w8a8", f"w8a8{AGAIN}", "flexquant:phase-batch"]


def driver_problem(built_for: str | None, library: str = "libcuda.so.1") -> str:
    """Return why PyTorch, built for a version of CUDA (None: for CPUs), cannot use the GPU's driver.

    Returns an empty text if it can, if there is no driver, and if the user hides the GPU.
    """
    version = ctypes.c_int()
    try:
        asked = ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return ""
    if asked != 0 or os.environ.get("CUDA_VISIBLE_DEVICES", "all") == "":
        return ""
    major, minor = divmod(version.value // 10, 100)
    found = f"this machine's NVIDIA driver speaks CUDA {major}.{minor}, but this PyTorch is built for "
    advice = "; or set CUDA_VISIBLE_DEVICES= to try the proof in miniature on the CPU"
    if built_for is None:
        return f"{found}CPUs: install a PyTorch for CUDA {major}{advice}"
    if major < int(built_for.partition(".")[0]):
        return f"{found}CUDA {built_for}: install a driver for it (580 or newer has CUDA 13){advice}"
    return ""


def free_gib() -> float:
    """Return the GPU's free memory; another process asks for it, since asking takes some of it for good."""
    asked = subprocess.run([sys.executable, "-c", FREE_MEMORY], capture_output=True, text=True, check=True)
    return int(asked.stdout) / 2**30


def server_gib(shape: Shape, bytes_a_weight: float, cache: float) -> float:
    """Return the GiB that a server of a shape takes, with a KV cache of ``cache`` GiB."""
    linear = shape.layers * sum(outputs * inputs for outputs, inputs in shape.projections().values())
    ends = (1 if shape.tied else 2) * 2 * shape.vocabulary * shape.hidden
    return (linear * bytes_a_weight + ends) / 2**30 + cache + SERVER_GIB


def kv_cache_gib(shape: Shape, tokens: int) -> float:
    """Return the size of a KV cache that holds ``tokens`` tokens, and a tenth more."""
    return 1.1 * tokens * shape.kv_bytes_per_token / 2**30


def fitting(names: Iterable[str], free: float, bytes_a_weight: float, tokens: int) -> list[str]:
    """Return the names of the shapes of which a server fits into ``free`` GiB, in the given order."""
    return [
        name
        for name in names
        if server_gib(SHAPES[name], bytes_a_weight, kv_cache_gib(SHAPES[name], tokens)) <= USABLE * free
    ]


def serving_options(model: Model, on_gpu: bool) -> list[str]:
    """Return the arguments of the serving step: as many subjects as the GPU has memory for."""
    workloads = SERVING if on_gpu else MINIATURE
    cache = max(1.0, kv_cache_gib(model.shape, most_tokens(workloads)))
    subjects = fitting_subjects(model.shape, cache, free_gib()) if on_gpu else MINIATURE_SUBJECTS
    return [
        *("--parts", "serving"),
        *("--subjects", ",".join(subjects)),
        *(("--rounds", "6", "--max-rounds", "20") if on_gpu else ("--rounds", "1")),
        *("--serving", *(workload.name for workload in workloads)),
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
