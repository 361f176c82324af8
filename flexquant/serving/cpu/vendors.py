# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Hold each of vLLM's INT4 kernels for CPUs with AVX512, its own and AMD's, to one precision.

If vLLM has a W4A8 kernel (zentorch, or AMX) and ``VLLM_CPU_INT4_W4A8`` is not 0, it runs all W4A16 layers of
the process as W4A8, and the layer's name does not show it. Here a variant gets the precision in its name:
W4A16 never rounds its activations, and W4A8, derived by a policy, can run beside it in the same process.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from flexquant.errors import FlexQuantError
from flexquant.serving.vllm_api import (
    CPUWNA16LinearKernel,
    MPLinearLayerConfig,
    ZentorchWNA16LinearKernel,
    envs,
    scalar_types,
)

W4A16_IN = torch.float16
"""Dtype of activations for which vLLM has no W4A8 on a CPU; its W4A16 kernels accept any 16-bit dtype."""
W4A8_IN = torch.bfloat16
"""Dtype of activations for which vLLM has W4A8 on a CPU."""


class HeldToOnePrecision:
    """Tells vLLM's kernel the dtype of activations that makes it choose the wanted precision."""

    of: ClassVar[str]
    """vLLM's name of the kernel, with which ``VLLM_DISABLED_KERNELS`` can disable it."""
    act_type: ClassVar[torch.dtype]

    def __init__(self, c: MPLinearLayerConfig, *names: str | None) -> None:
        super().__init__(dataclasses.replace(c, act_type=self.act_type), *names)  # type: ignore[call-arg]
        torch.cpu._init_amx()  # Linux ends a process that uses AMX unasked; oneDNN asks at its first product


class CPUW4A16LinearKernel(HeldToOnePrecision, CPUWNA16LinearKernel):
    """``cpu_gemm_wna16``, which has code for AVX512 and for AMX."""

    of, act_type = "CPUWNA16LinearKernel", W4A16_IN


class AMXW4A8LinearKernel(HeldToOnePrecision, CPUWNA16LinearKernel):
    """``int4_scaled_mm_cpu``, for AMX."""

    of, act_type = "CPUWNA16LinearKernel", W4A8_IN

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        if not torch.cpu._is_amx_tile_supported():
            return False, "this CPU has no AMX"
        return w4a8_problem(c) or super().can_implement(c)


class ZentorchW4A16LinearKernel(HeldToOnePrecision, ZentorchWNA16LinearKernel):
    """W4A16 by ``zentorch_woq_linear``."""

    of, act_type = "ZentorchWNA16LinearKernel", W4A16_IN


class ZentorchW4A8LinearKernel(HeldToOnePrecision, ZentorchWNA16LinearKernel):
    """W4A8 by ``zentorch_dynamic_qlinear`` on INT4 weights, in vLLM 0.31 and later."""

    of, act_type = "ZentorchWNA16LinearKernel", W4A8_IN

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        if not hasattr(cls, "_maybe_process_da8w4_weights"):
            return False, "this vLLM has no W4A8 for zentorch; update it to 0.31 or later"
        group = c.partition_weight_shape[0] if c.group_size == -1 else c.group_size
        if group % 4:
            return False, f"group size {group} is no multiple of 4"
        return w4a8_problem(c) or super().can_implement(c)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        super().process_weights_after_loading(layer)
        if not getattr(layer, "_zentorch_da8w4", False):
            raise FlexQuantError(
                "vLLM did not make W4A8 of a layer for zentorch; set "
                f"VLLM_DISABLED_KERNELS={type(self).__name__} to have another kernel"
            )

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return [..., out] for ``x`` [..., in]; one token is computed as two, which is faster."""
        flat = x.reshape(-1, x.shape[-1])
        alone = len(flat) == 1
        out = super().apply_weights(layer, flat.expand(2, -1).contiguous() if alone else flat, bias)
        return out[: len(flat)].to(x.dtype).reshape(*x.shape[:-1], out.shape[-1])


def w4a8_problem(c: MPLinearLayerConfig) -> tuple[bool, str] | None:
    """Return why a layer cannot have vLLM's W4A8 on a CPU, in ``can_implement``'s form; None if it can."""
    if not envs.VLLM_CPU_INT4_W4A8:
        return False, "VLLM_CPU_INT4_W4A8=0 turns it off"
    if c.weight_type != scalar_types.uint4b8 or c.zero_points:
        return False, f"only symmetric INT4 is supported, not {c.weight_type}"
    return None
