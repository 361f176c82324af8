# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Provide W4A16 with PyTorch's own INT4 operator behind vLLM's interface, and a stand-in for W4A8."""

from __future__ import annotations

import torch

from flexquant.serving.vllm_api import (
    MPLinearKernel,
    MPLinearLayerConfig,
    replace_parameter,
    scalar_types,
    unpack_quantized_values_into_int32,
)
from flexquant.serving.vllm_api import _custom_ops as ops

GROUP_SIZES = (32, 64, 128, 256)
MIDDLE = 8
"""Zero point of symmetric weights."""
INNER_K_TILES = 2
"""An argument that ATen's packing operator requires, and its CPU implementation ignores."""


class TorchCPUInt4LinearKernel(MPLinearKernel):
    """Group-wise INT4 weights with 16- or 32-bit activations, by ``_weight_int4pack_mm_for_cpu``.

    The operator is in ATen (``aten/src/ATen/native/cpu/int4mm_kernel.cpp``) with AVX2 and AVX512 code.
    """

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        in_features, out_features = c.partition_weight_shape
        if c.weight_type != (scalar_types.uint4 if c.zero_points else scalar_types.uint4b8):
            return False, f"only INT4 is supported, symmetric or with zero points, not {c.weight_type}"
        if getattr(c, "has_g_idx", False):  # vLLM 0.26 has the field, 0.32 does not
            return False, "activation ordering by group (g_idx) is not supported"
        if c.group_size not in GROUP_SIZES or in_features % c.group_size:
            return False, f"group size {c.group_size} is not one of {GROUP_SIZES} that divides {in_features}"
        if out_features % 16:
            return False, f"{out_features} output features are not a multiple of 16"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        packed, scale, zero, *_ = self._get_weight_params(layer)
        # int32 [out, in/8] and [out, in/group]; GPTQ's, and AWQ's as vLLM rewrites them, are transposed.
        is_transposed = getattr(packed, "packed_dim", 1) == 0
        q = unpack_quantized_values_into_int32(
            packed.data, self.config.weight_type, 0 if is_transposed else 1
        )
        if is_transposed:
            q, scale = q.t(), scale.t()
        weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.contiguous(), INNER_K_TILES)
        scale_and_zero = torch.zeros(*scale.t().shape, 2, dtype=scale.dtype)  # [in/group, out, 2]
        scale_and_zero[..., 0] = scale.data.t()
        if self.config.zero_points:
            assert zero is not None
            is_transposed = getattr(zero, "output_dim", 1) == 0
            zero.data = (zero.data.t() if is_transposed else zero.data).contiguous()
            middle = unpack_quantized_values_into_int32(zero.data, self.config.weight_type, 1)
            scale_and_zero[..., 1] = (MIDDLE - middle) * scale.data.t()  # ATen adds it to what is symmetric
        for name, value in ((self.w_q_name, weight), (self.w_s_name, scale_and_zero)):
            replace_parameter(layer, name, torch.nn.Parameter(value, requires_grad=False))

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = self._multiply(layer, x.reshape(-1, x.shape[-1]))
        if bias is not None:
            out = out + bias
        return out.reshape(*x.shape[:-1], out.shape[-1])

    def _multiply(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return [tokens, out] for ``x`` [tokens, in], in its dtype."""
        weight, scale_and_zero, *_ = self._get_weight_params(layer)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, weight, self.config.group_size, scale_and_zero.to(x.dtype)
        )


class TorchCPUW4A8LinearKernel(TorchCPUInt4LinearKernel):
    """A stand-in for W4A8: it rounds activations to 8 bit per token, and multiplies them in 16 bit.

    It gives the answers of W4A8, but is slower than W4A16.
    """

    def _multiply(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        quantized, x_scale, _ = ops.onednn_scaled_int8_quant(x, None, None, True)  # .., [tokens, 1]
        return (super()._multiply(layer, quantized.to(torch.bfloat16)) * x_scale).to(x.dtype)
