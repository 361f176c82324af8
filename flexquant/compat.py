# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Every place where FlexQuant makes up for a particular vLLM, each with the condition to delete it."""

from __future__ import annotations

import functools
import os

import torch


@functools.cache
def provide_cpu_int4_kernel() -> None:
    """Give W4A16 a kernel, in this process, on a CPU where vLLM's own is selected but was not compiled.

    vLLM 0.32's CPUWNA16LinearKernel accepts every layer, and then fails at the first forward pass where the
    CPU has no AVX512, because ``torch.ops._C.cpu_gemm_wna16`` is missing from its AVX2 library. Delete when
    the oldest supported vLLM either has the operator for AVX2 or does not select the kernel without it.
    """
    from vllm.platforms import PlatformEnum, current_platform

    if not current_platform.is_cpu() or torch.backends.cpu.get_cpu_capability() != "AVX2":
        return
    from vllm import _custom_ops  # noqa: F401 - loads torch.ops._C

    if hasattr(torch.ops._C, "cpu_gemm_wna16"):
        return
    from vllm.model_executor.kernels.linear import register_linear_kernel

    from flexquant.cpu_int4 import TorchCPUInt4LinearKernel

    disabled = os.environ.get("VLLM_DISABLED_KERNELS", "")
    os.environ["VLLM_DISABLED_KERNELS"] = ",".join(filter(None, [disabled, "CPUWNA16LinearKernel"]))
    register_linear_kernel(TorchCPUInt4LinearKernel, PlatformEnum.CPU, "mp")
