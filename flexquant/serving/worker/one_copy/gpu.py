# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Multiply in 8 bit on a GPU by weights that are computed from INT4 weights.

``gpu_kernel`` writes a layer's 8-bit weights into memory that all layers share, and vLLM's CUTLASS product
follows. ``gpu_layouts`` says how INT4 kernels keep the weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from vllm.platforms import current_platform

from flexquant.checkpoint.nested import unpack_nibbles
from flexquant.serving.vllm_api import MPLinearKernel, get_scale_perms
from flexquant.serving.vllm_api import _custom_ops as ops
from flexquant.serving.worker.one_copy.gpu_kernel import INT8, eight_bit_weights
from flexquant.serving.worker.one_copy.gpu_layouts import (
    Layout,
    in_order_of_outputs,
    packed_alike,
    permuted_back,
)
from flexquant.serving.worker.one_copy.operands import (
    CHANNEL_SCALE,
    COLUMN,
    DIFFERENCE,
    EXCEPTIONS,
    PLACES,
    ROW,
    WEIGHT_SUMS,
    NestedWeights,
)

ZERO, BIAS = "flexquant_zero", "flexquant_bias"
"""Names of further buffers of a layer: int8 [groups, outputs] and [outputs], in their order."""
FP8 = torch.float8_e4m3fn
GREATEST = {INT8: 127.0, FP8: 448.0}
"""Greatest weight of each precision."""
BLACKWELL = 100
"""Compute capability from which on vLLM's CUTLASS product has no INT8; FP8 takes its place."""
NESTED = (COLUMN, DIFFERENCE, PLACES, EXCEPTIONS)
"""The buffers of nested weights, in the order in which the kernel takes them."""

_memory: dict[torch.device, torch.Tensor] = {}
_library = torch.library.Library("flexquant", "FRAGMENT")
_library.define(
    "one_copy_gpu_linear(Tensor x, Tensor packed, Tensor scale, Tensor? zero, Tensor row, Tensor[] nested, "
    "Tensor channel_scale, Tensor? weight_sums, Tensor? bias, ScalarType precision, bool outputs_first) "
    "-> Tensor"
)


def channel_scales(
    packed: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    precision: torch.dtype,
    outputs_first: bool,
) -> torch.Tensor:
    """Return the scales of 8-bit weights, float32 [outputs], by each channel's greatest weight."""
    groups, outputs = scale.shape
    inputs = packed.numel() * 8 // outputs
    ones = torch.ones_like(scale, dtype=torch.float32)
    out = scratch(packed.device, inputs * outputs, INT8).view(outputs, inputs)
    values = eight_bit_weights(packed, ones, zero, ones[0], out, outputs_first)  # value - zero, exactly
    most = values.view(outputs, groups, -1).abs().amax(2).float()
    greatest = (most * in_order_of_outputs(scale).float().abs().t()).amax(1)
    return torch.where(greatest > 0, greatest / GREATEST[precision], 1.0)


class GPUProduct:
    """Multiplies in 8 bit by weights that are computed from those that ``kernel`` keeps in INT4."""

    def __init__(self, kernel: MPLinearKernel, layout: Layout, precision: str) -> None:
        self._kernel = kernel
        self._layout = layout
        self._precision = eight_bit_type(precision)
        self.precision = "FP8" if self._precision == FP8 else "INT8"

    def shared_bytes(self, inputs: int, outputs: int) -> int:
        """Return the bytes to which a layer's weights are written."""
        return inputs * outputs

    def prepare(
        self, source: torch.nn.Module, nested: NestedWeights | None = None, symmetric: bool = True
    ) -> dict[str, torch.Tensor]:
        """Return what :meth:`multiply` needs beside ``source``, once its weights are packed.

        Without ``nested``, the weights are those nearest to the source's. ``symmetric``: activations, which
        else have a zero point for each token.
        """
        packed, scale, zero = self._layout.tensors(self._kernel, source)
        buffers, outputs_first = {} if zero is None else {ZERO: zero}, self._layout.outputs_first
        if nested is not None:
            inputs, outputs = len(nested.column), scale.shape[1]
            memory = scratch(packed.device, inputs * outputs, INT8).view(outputs, inputs)
            difference = packed_alike(unpack_nibbles(nested.difference), self._layout)
            exceptions = {PLACES: nested.exception_input, EXCEPTIONS: nested.exception}
            buffers |= nested.factors() | {DIFFERENCE: difference} | exceptions
            if not symmetric:
                operands = packed, scale, zero, buffers[ROW], memory, outputs_first
                weights = eight_bit_weights(*operands, [buffers[name] for name in NESTED])
                buffers[WEIGHT_SUMS] = weights.sum(1, dtype=torch.int32)
            return buffers
        channel_scale = channel_scales(packed, scale, zero, self._precision, outputs_first)
        buffers |= {CHANNEL_SCALE: channel_scale, ROW: channel_scale.reciprocal()}
        if (bias := getattr(source, "bias", None)) is not None:
            buffers[BIAS] = permuted_back(bias, get_scale_perms()[1])
        return buffers

    def multiply(
        self,
        source: torch.nn.Module,
        buffers: Mapping[str, torch.Tensor | None],
        x: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return [tokens, outputs] for ``x`` [tokens, inputs], in its dtype."""
        weight, scale, _ = self._layout.names or (self._kernel.w_q_name, self._kernel.w_s_name, "")
        out: torch.Tensor = torch.ops.flexquant.one_copy_gpu_linear(
            x,
            getattr(source, weight),
            getattr(source, scale),
            buffers.get(ZERO),
            buffers[ROW],
            [buffers[name] for name in NESTED if name in buffers],
            buffers[CHANNEL_SCALE],
            buffers.get(WEIGHT_SUMS),
            None if bias is None else buffers.get(BIAS, bias),
            self._precision,
            self._layout.outputs_first,
        )
        return out


@torch.library.impl(_library, "one_copy_gpu_linear", "CUDA")
def one_copy_gpu_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    row: torch.Tensor,
    nested: list[torch.Tensor],
    channel_scale: torch.Tensor,
    weight_sums: torch.Tensor | None,
    bias: torch.Tensor | None,
    precision: torch.dtype,
    outputs_first: bool,
) -> torch.Tensor:
    """Return [tokens, outputs] for ``x`` [tokens, inputs], quantised per token and multiplied in 8 bit."""
    outputs, inputs = scale.shape[1], x.shape[1]
    out = scratch(x.device, inputs * outputs, precision).view(outputs, inputs)
    weights = eight_bit_weights(packed, scale, zero, row, out, outputs_first, nested)
    return multiply_in_8_bit(x, weights, channel_scale, bias, weight_sums)


def multiply_in_8_bit(
    x: torch.Tensor,
    weights: torch.Tensor,
    channel_scale: torch.Tensor,
    bias: torch.Tensor | None,
    weight_sums: torch.Tensor | None = None,
) -> torch.Tensor:
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


@torch.library.register_fake("flexquant::one_copy_gpu_linear", lib=_library)
def _output_shape(x: torch.Tensor, packed: object, scale: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty((x.shape[0], scale.shape[1]))


def scratch(device: torch.device, weights: int, precision: torch.dtype) -> torch.Tensor:
    """Return memory for a layer's weights; it grows while layers are prepared, and never in a pass."""
    if device not in _memory or _memory[device].numel() < weights:
        _memory[device] = torch.empty(weights, dtype=INT8, device=device)
    return _memory[device][:weights].view(precision)
