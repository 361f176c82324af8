# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Give every quantised layer the fastest of the correct kernels, by a trial on this machine.

:mod:`~flexquant.serving.kernels.choice` says which kernels may be tried for a layer, and takes the fastest;
``trial`` times them once and keeps the result; ``layers`` reads and exchanges the kernel of a layer.
``cpu_kernels`` has the kernels that vLLM lacks on CPUs, and ``gpu_kernels`` those for W4A8 on GPUs.
"""

import platform
from pathlib import Path

STAND_INS = {
    "ExactCPUInt8LinearKernel": "which multiplies W8A8 in fp32 for want of VNNI",
    "TorchCPUW4A8LinearKernel": "which multiplies W4A8 in 16 bit for want of AMX or zentorch",
}
"""Name of a kernel that gives the right answers slowly -> what it does, as a relative clause."""
IDENTITY = ("vendor_id", "cpu family", "model", "flags", "CPU ", "Features")
"""How lines of /proc/cpuinfo begin that are the same at every start, on x86 and on Arm."""


def cpu_model() -> str:
    """Return the CPU's name in /proc/cpuinfo, or its architecture."""
    names = (line.partition(":")[2].strip() for line in cpu_identity() if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def cpu_identity() -> list[str]:
    """Return the architecture, and what /proc/cpuinfo says about the first CPU and its instruction sets."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        first = ""
    return [platform.machine(), *(line for line in first.splitlines() if line.startswith(IDENTITY))]
