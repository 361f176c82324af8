# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Hold each of AMD's INT4 kernels for Zen 4 and later (the extra ``zen``) to one precision."""

from __future__ import annotations

import torch

from flexquant.errors import FlexQuantError
from flexquant.serving.cpu.vendors import W4A8_IN, W4A16_IN, HeldToOnePrecision, w4a8_problem
from flexquant.serving.vllm_api import MPLinearLayerConfig, ZentorchWNA16LinearKernel


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
