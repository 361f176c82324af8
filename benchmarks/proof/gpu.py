# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The GPU of a proof: whether its driver suits this PyTorch, its free memory, and which shapes fit."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterable

from benchmarks.speed.shapes import SHAPES, Shape

SERVER_GIB = 2.5
"""GiB that a server takes beside weights and KV cache: activations, CUDA graphs, CUDA itself."""
USABLE = 0.95
"""Share of the free memory that may be planned for."""
FREE_MEMORY = "import torch; print(torch.cuda.mem_get_info()[0])"


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
