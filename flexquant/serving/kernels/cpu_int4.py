# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Multiply activations in 16 bit by INT4 weights on a CPU: by PyTorch's operator, or by a faster loop."""

from __future__ import annotations

import functools

import torch

from flexquant.serving.kernels.cpu_loops import has_loops
from flexquant.serving.vllm_api import (
    MPLinearKernel,
    MPLinearLayerConfig,
    replace_parameter,
    scalar_types,
    unpack_quantized_values_into_int32,
)

GROUP_SIZES = (32, 64, 128, 256)
MIDDLE = 8
"""Zero point of symmetric weights."""
INNER_K_TILES = 2
"""An argument that ATen's packing operator requires, and its CPU implementation ignores."""
BLOCK = 64
"""Outputs of a block of PyTorch's layout on a CPU with AVX512; weight_only.cpp takes whole blocks."""


class TorchCPUInt4LinearKernel(MPLinearKernel):
    """Group-wise INT4 weights, by ATen's ``_weight_int4pack_mm_for_cpu`` for AVX2 and AVX512."""

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
        dim = 0 if getattr(packed, "packed_dim", 1) == 0 else 1
        q = unpack_quantized_values_into_int32(packed.data, self.config.weight_type, dim)
        if dim == 0:
            q, scale = q.t(), scale.t()
        weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.contiguous(), INNER_K_TILES)
        scale_and_zero = torch.zeros(*scale.t().shape, 2, dtype=scale.dtype)  # [in/group, out, 2]
        scale_and_zero[..., 0] = scale.data.t()
        if self.config.zero_points:
            assert zero is not None
            zero.data = (zero.data.t() if getattr(zero, "output_dim", 1) == 0 else zero.data).contiguous()
            middle = unpack_quantized_values_into_int32(zero.data, self.config.weight_type, 1)
            scale_and_zero[..., 1] = (MIDDLE - middle) * scale.data.t()  # ATen adds it to what is symmetric
        for name, value in ((self.w_q_name, weight), (self.w_s_name, scale_and_zero)):
            replace_parameter(layer, name, torch.nn.Parameter(value, requires_grad=False))

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = self._multiply(layer, x.reshape(-1, x.shape[-1]))
        return (out if bias is None else out + bias).reshape(*x.shape[:-1], out.shape[-1])

    def _multiply(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return [tokens, out] for ``x`` [tokens, in], in its dtype."""
        weight, scale_and_zero, *_ = self._get_weight_params(layer)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, weight, self.config.group_size, scale_and_zero.to(x.dtype)
        )


class FlexQuantCPUInt4LinearKernel(TorchCPUInt4LinearKernel):
    """The same weights, multiplied by the loop of weight_only.cpp: activations in bfloat16, and sums in fp32.

    A byte is read once for up to six tokens. The loop needs AVX512-BF16 and AVX512-VBMI.
    """

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        if c.act_type != torch.bfloat16:
            return False, f"activations are {c.act_type}, not torch.bfloat16"
        if c.partition_weight_shape[1] % BLOCK:
            return False, f"{c.partition_weight_shape[1]} output features are not a multiple of {BLOCK}"
        if not has_int4_loop():
            return False, "this CPU lacks AVX512-BF16 or AVX512-VBMI, or there is no compiler"
        return super().can_implement(c)

    def _multiply(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        weight, scale_and_zero, *_ = self._get_weight_params(layer)
        multiply = torch.ops.flexquant_weight_only.multiply_int4
        out: torch.Tensor = multiply(x, weight, scale_and_zero.to(x.dtype))
        return out


@functools.cache
def has_int4_loop() -> bool:
    """Whether this CPU has the instructions of the loop, and the loop is compiled."""
    found = torch.cpu.get_capabilities()
    if not (found.get("avx512_bf16") and found.get("avx512_vbmi") and has_loops()):
        return False
    if not hasattr(torch.ops.flexquant_weight_only, "multiply_int4"):  # the compiler knew them not
        return False
    torch.library.register_fake("flexquant_weight_only::multiply_int4", _output_shape)
    return True


def _output_shape(x: torch.Tensor, weight: torch.Tensor, scale_and_zero: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0], scale_and_zero.shape[1]))
