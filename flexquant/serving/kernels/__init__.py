# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Give every quantised layer the fastest of the correct kernels, by a trial on this machine.

:mod:`~flexquant.serving.kernels.choice` says which kernels may be tried for a layer, and takes the fastest;
``trial`` times them once and keeps the result; ``layers`` reads and exchanges the kernel of a layer.
``cpu_kernels`` has the kernels that vLLM lacks on CPUs, and ``gpu_kernels`` those for W4A8 on GPUs.
"""

from __future__ import annotations

import platform
from pathlib import Path

STAND_INS = {
    "ExactCPUInt8LinearKernel": "which multiplies W8A8 in fp32 for want of VNNI",
    "TorchCPUW4A8LinearKernel": "which multiplies W4A8 in 16 bit for want of AMX or zentorch",
}
"""Name of a kernel that gives the right answers slowly -> what it does, as a relative clause."""


def cpu_model() -> str:
    """Return the CPU's name in /proc/cpuinfo, or its architecture."""
    return _of_cpu("model name") or platform.processor() or platform.machine()


def cpu_flags() -> str:
    """Return the names of the CPU's instruction sets in /proc/cpuinfo; empty if it names none."""
    return _of_cpu("flags")


def _of_cpu(key: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")
