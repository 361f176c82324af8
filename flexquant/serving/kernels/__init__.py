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
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
