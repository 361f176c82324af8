# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Multiply in 8 bit on a GPU by weights that are computed from INT4 weights.

``gpu_kernel`` writes a layer's 8-bit weights into memory that all layers share, and vLLM's CUTLASS product
follows. ``gpu_layouts`` says how INT4 kernels keep the weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from vllm.platforms import current_platform

from flexquant.serving.vllm_api import MPLinearKernel, get_scale_perms
from flexquant.serving.vllm_api import _custom_ops as ops
from flexquant.serving.worker.one_copy.gpu_kernel import INT8, eight_bit_weights
from flexquant.serving.worker.one_copy.gpu_layouts import (
    Layout,
    in_order_of_outputs,
    packed_alike,
    permuted_back,
)
from flexquant.serving.worker.one_copy.product import (
    CHANNEL_SCALE,
    NESTED,
    ROW,
    WEIGHT_SUMS,
    Buffers,
    Product,
    output_of_int4,
    register_operator,
)

ZERO, BIAS = "flexquant_zero", "flexquant_bias"
"""Names of further buffers of a layer: int8 [groups, outputs] and [outputs], in their order."""
FP8 = torch.float8_e4m3fn
GREATEST = {INT8: 127.0, FP8: 448.0}
"""Greatest weight of each precision."""
BLACKWELL = 100
"""Compute capability from which on vLLM's CUTLASS product has no INT8; FP8 takes its place."""

_memory: dict[torch.device, Tensor] = {}


def channel_scales(
    packed: Tensor, scale: Tensor, zero: Tensor | None, precision: torch.dtype, outputs_first: bool
) -> Tensor:
    """Return the scales of 8-bit weights, float32 [outputs], by each channel's greatest weight."""
    groups, outputs = scale.shape
    inputs = packed.numel() * 8 // outputs
    ones = torch.ones_like(scale, dtype=torch.float32)
    out = scratch(packed.device, inputs * outputs, INT8).view(outputs, inputs)
    values = eight_bit_weights(packed, ones, zero, ones[0], out, outputs_first)  # value - zero, exactly
    most = values.view(outputs, groups, -1).abs().amax(2).float()
    greatest = (most * in_order_of_outputs(scale).float().abs().t()).amax(1)
    return torch.where(greatest > 0, greatest / GREATEST[precision], 1.0)


class GPUProduct(Product):
    """The product of a GPU, in INT8 or FP8."""

    def __init__(self, kernel: MPLinearKernel, layout: Layout, precision: str) -> None:
        super().__init__(kernel)
        self._layout = layout
        self._precision = eight_bit_type(precision)
        self.precision = "FP8" if self._precision == FP8 else "INT8"

    def prepare(
        self, source: nn.Module, nested: Mapping[str, Tensor] | None = None, symmetric: bool = True
    ) -> dict[str, Tensor]:
        packed, _, zero = self._weights(source)
        scratch(packed.device, self._inputs * self._outputs, self._precision)  # which is not made in a pass
        buffers = super().prepare(source, nested, symmetric)
        if zero is not None:
            buffers[ZERO] = zero
        if nested is None and (bias := getattr(source, "bias", None)) is not None:
            buffers[BIAS] = permuted_back(bias, get_scale_perms()[1])
        return buffers

    def multiply(self, source: nn.Module, buffers: Buffers, x: Tensor, bias: Tensor | None) -> Tensor:
        weight, scale, _ = self._layout.names or (self._kernel.w_q_name, self._kernel.w_s_name, "")
        int4 = getattr(source, weight), getattr(source, scale), buffers.get(ZERO)
        nested = [buffers[name] for name in NESTED if name in buffers]
        factors = buffers[ROW], nested, buffers[CHANNEL_SCALE], buffers.get(WEIGHT_SUMS)
        bias = None if bias is None else buffers.get(BIAS, bias)
        kept = self._precision, self._layout.outputs_first
        out: Tensor = torch.ops.flexquant.one_copy_gpu_linear(x, *int4, *factors, bias, *kept)
        return out

    def _channel_scales(self, source: nn.Module) -> Tensor:
        return channel_scales(*self._weights(source), self._precision, self._layout.outputs_first)

    def _packed(self, difference: Tensor) -> Tensor:
        return packed_alike(difference, self._layout)

    def _weight_sums(self, source: nn.Module, buffers: Buffers) -> Tensor:
        packed, scale, zero = self._weights(source)
        memory = scratch(packed.device, self._inputs * self._outputs, INT8).view(self._outputs, self._inputs)
        nested = [buffers[name] for name in NESTED]
        outputs_first = self._layout.outputs_first
        weights = eight_bit_weights(packed, scale, zero, buffers[ROW], memory, outputs_first, nested)
        return weights.sum(1, dtype=torch.int32)

    def _weights(self, source: nn.Module) -> tuple[Tensor, Tensor, Tensor | None]:
        return self._layout.tensors(self._kernel, source)


def one_copy_gpu_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    row: Tensor,
    nested: list[Tensor],
    channel_scale: Tensor,
    weight_sums: Tensor | None,
    bias: Tensor | None,
    precision: torch.dtype,
    outputs_first: bool,
) -> Tensor:
    """Return [tokens, outputs] for ``x`` [tokens, inputs], quantised per token and multiplied in 8 bit."""
    outputs, inputs = scale.shape[1], x.shape[1]
    out = scratch(x.device, inputs * outputs, precision).view(outputs, inputs)
    weights = eight_bit_weights(packed, scale, zero, row, out, outputs_first, nested)
    return multiply_in_8_bit(x, weights, channel_scale, bias, weight_sums)


register_operator(one_copy_gpu_linear, "CUDA", output_of_int4)


def multiply_in_8_bit(
    x: Tensor, weights: Tensor, channel_scale: Tensor, bias: Tensor | None, weight_sums: Tensor | None = None
) -> Tensor:
    """Return [tokens, outputs] for ``x`` [tokens, inputs], in its dtype, which is quantised per token.

    ``weights`` int8 or float8_e4m3fn [outputs, inputs], ``channel_scale`` float32 [outputs]. With
    ``weight_sums``, int32 [outputs], each token has a zero point; not in FP8.
    """
    operand, of_weights = weights.t(), channel_scale[:, None]
    if weights.dtype == FP8:
        quantized, scales = ops.scaled_fp8_quant(x.contiguous(), use_per_token_if_dynamic=True)
        return ops.cutlass_scaled_mm(quantized, operand, scales, of_weights, x.dtype, bias)
    quantized, scales, zero = ops.scaled_int8_quant(x.contiguous(), None, None, symmetric=weight_sums is None)
    operands = quantized, operand, scales, of_weights, x.dtype
    if weight_sums is None:
        return ops.cutlass_scaled_mm(*operands, bias)
    return ops.cutlass_scaled_mm_azp(*operands, weight_sums[None], zero, bias)


def eight_bit_type(precision: str) -> torch.dtype:
    """Return the type in which this GPU multiplies where a policy says int8 or fp8."""
    return FP8 if precision == "fp8" or current_platform.has_device_capability(BLACKWELL) else INT8


def scratch(device: torch.device, weights: int, precision: torch.dtype) -> Tensor:
    """Return memory for a layer's weights; it grows while layers are prepared, and never in a pass."""
    if device not in _memory or _memory[device].numel() < weights:
        _memory[device] = torch.empty(weights, dtype=INT8, device=device)
    return _memory[device][:weights].view(precision)
