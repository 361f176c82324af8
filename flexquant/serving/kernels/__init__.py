# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Give every quantised layer the fastest of the correct kernels, chosen by a trial on this machine.

:mod:`~flexquant.serving.kernels.layers` reads and exchanges the kernel of a layer, and
:mod:`~flexquant.serving.kernels.trial` times kernels once and keeps the result; both hold for any device. For
CPUs, ``cpu_kernels`` has the kernels that vLLM lacks, and ``cpu_kernel_choice`` says which may be tried.
"""

STAND_INS = {
    "ExactCPUInt8LinearKernel": "which multiplies W8A8 in fp32 for want of VNNI",
    "TorchCPUW4A8LinearKernel": "which multiplies W4A8 in 16 bit for want of AMX or zentorch",
}
"""Name of a kernel that gives the right answers slowly -> what it does, as a relative clause."""
