# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Replace some of vLLM's CPU kernels in this process; each has a condition for deleting it."""

from __future__ import annotations

import functools
import os
import platform
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from flexquant.serving.worker.linear_kernels import LinearKernel


@functools.cache
def provide_cpu_kernels() -> None:
    """Provide W4A16 and W8A8 kernels, in this process, on a CPU for which vLLM's own are missing or wrong."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from flexquant.serving.vllm_api import _custom_ops  # noqa: F401 - loads torch.ops._C

        _provide_cpu_int4_kernel()
        if platform.machine() in ("x86_64", "AMD64"):
            _provide_cpu_int8_kernel()


def _provide_cpu_int4_kernel() -> None:
    """Replace a kernel that vLLM selects although it is not compiled for this CPU.

    vLLM's CPUWNA16LinearKernel (0.26 and 0.32) accepts every layer, and then fails at the first forward pass
    on a CPU without AVX512, because its AVX2 library lacks ``torch.ops._C.cpu_gemm_wna16``. Delete this once
    the oldest supported vLLM has the operator for AVX2, or does not select the kernel without it.
    """
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        from flexquant.serving.cpu.int4 import TorchCPUInt4LinearKernel

        _replace_cpu_kernel("CPUWNA16LinearKernel", TorchCPUInt4LinearKernel, "mp")


def _provide_cpu_int8_kernel() -> None:
    """Replace a kernel whose sums overflow, or that fails for some models.

    vLLM's CPUInt8ScaledMMLinearKernel (0.26 and 0.32) passes s8 x s8 to oneDNN, which saturates on CPUs
    without VNNI, even with AVX512. Delete this once :func:`flexquant.serving.cpu.int8.int8_saturates` is
    False there for the oldest supported vLLM.

    On CPUs with AMX the kernel uses another operator, which takes only [tokens, in], while models that vLLM
    runs through transformers pass [1, tokens, in]. Delete this once the oldest supported vLLM reshapes them,
    as it does for oneDNN.
    """
    from flexquant.serving.cpu.int8 import (
        AnyShapeCPUInt8LinearKernel,
        ExactCPUInt8LinearKernel,
        int8_saturates,
    )

    if int8_saturates():
        _replace_cpu_kernel("CPUInt8ScaledMMLinearKernel", ExactCPUInt8LinearKernel, "int8")
    elif torch.cpu._is_amx_tile_supported():
        _replace_cpu_kernel("CPUInt8ScaledMMLinearKernel", AnyShapeCPUInt8LinearKernel, "int8")


STAND_INS = {
    "ExactCPUInt8LinearKernel": "which multiplies W8A8 in fp32 for want of VNNI",
    "TorchCPUW4A8LinearKernel": "which multiplies W4A8 in 16 bit for want of AMX or zentorch",
}
"""Name of a kernel that gives the right answers slowly -> what it does, as a relative clause."""
REPLACED: dict[str, type[LinearKernel]] = {}
"""Name of a vLLM kernel that is replaced in this process -> its replacement."""


def _replace_cpu_kernel(name: str, kernel: type[LinearKernel], kind: str) -> None:
    from vllm.platforms import PlatformEnum

    from flexquant.serving.vllm_api import register_linear_kernel

    disabled = os.environ.get("VLLM_DISABLED_KERNELS", "")
    os.environ["VLLM_DISABLED_KERNELS"] = ",".join(filter(None, [disabled, name]))
    register_linear_kernel(kernel, PlatformEnum.CPU, kind)
    REPLACED[name] = kernel
