# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Wrap vLLM's W8A8 kernel for AMX, so that it takes inputs of any number of dimensions."""

from __future__ import annotations

import torch

from flexquant.serving.vllm_api import CPUInt8ScaledMMLinearKernel


class AnyShapeCPUInt8LinearKernel(CPUInt8ScaledMMLinearKernel):
    """Takes [..., in], where vLLM's kernel takes [tokens, in] only."""

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return [..., out] for ``x`` [..., in] in 16 bit."""
        out = super().apply_weights(layer, x.reshape(-1, x.shape[-1]), bias)
        return out.reshape(*x.shape[:-1], out.shape[-1])
