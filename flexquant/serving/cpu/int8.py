# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Provide W8A8 on CPUs for which vLLM's kernel is wrong or too narrow, behind vLLM's kernel interface.

Without VNNI, oneDNN adds products of 8-bit pairs in 16 bits (``vpmaddubsw``), which overflows at +-32767 if
weights and activations are both large: every linear has a few percent of error, without a warning. In fp32,
8-bit integers and their products are exact, and sums are exact to 7 digits.

The weights are converted to fp32 a few rows at a time, into a buffer that each thread keeps: allocating it in
every linear of every pass would take several times as long as the multiplication.
"""

from __future__ import annotations

import threading

import torch

from flexquant.serving.vllm_api import CPUInt8ScaledMMLinearKernel, convert_to_channelwise, replace_parameter
from flexquant.serving.vllm_api import _custom_ops as ops

WIDENED_BYTES = 8 << 20
"""Bytes of a thread's buffer for fp32 weights."""

_kept = threading.local()
_operators = torch.library.Library("flexquant", "FRAGMENT")
_operators.define("exact_int8_linear(Tensor x, Tensor x_scale, Tensor weight, Tensor scale) -> Tensor")


def int8_saturates() -> bool:
    """Whether vLLM's INT8 operator gives wrong sums on this CPU, tried with the largest 8-bit values."""
    x, weight = (torch.full((rows, 64), 127, dtype=torch.int8) for rows in (1, 16))  # [.., in]
    out, scales, x_scale = (torch.ones(shape, dtype=torch.float32) for shape in ((1, 16), (16, 1), (1, 1)))
    handler = ops.create_onednn_scaled_mm(weight.t(), scales, out.dtype, True, False, 32)
    ops.onednn_scaled_mm(handler, x, out, x_scale, None, None, None)
    return bool((out != 64 * 127 * 127).any())


class AnyShapeCPUInt8LinearKernel(CPUInt8ScaledMMLinearKernel):
    """Takes [..., in], where vLLM's kernel takes [tokens, in] only."""

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return [..., out] for ``x`` [..., in] in 16 bit."""
        out = super().apply_weights(layer, x.reshape(-1, x.shape[-1]), bias)
        return out.reshape(*x.shape[:-1], out.shape[-1])


class ExactCPUInt8LinearKernel(CPUInt8ScaledMMLinearKernel):
    """vLLM's kernel with fp32 products for dynamic symmetric activations; other schemes are vLLM's own."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if self.config.is_static_input_scheme or not self.config.input_symmetric:
            super().process_weights_after_loading(layer)
            return
        w_q_name, w_s_name, *_ = self.layer_param_names
        weight, scale = getattr(layer, w_q_name), getattr(layer, w_s_name)  # int8 [out, in], [out, 1]
        if not self.config.is_channelwise:
            scale = convert_to_channelwise(scale, vars(layer)["logical_widths"])
        for name, value in ((w_q_name, weight.data), (w_s_name, scale.data.float().reshape(1, -1))):
            replace_parameter(layer, name, torch.nn.Parameter(value, requires_grad=False))
        self.linear_method = self._apply_weights_exactly

    def _apply_weights_exactly(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight, scale, *_ = self._get_layer_params(layer)
        quantized, x_scale, _ = ops.onednn_scaled_int8_quant(x.reshape(-1, x.shape[-1]), None, None, True)
        out = torch.ops.flexquant.exact_int8_linear(quantized, x_scale, weight, scale)
        if bias is not None:
            out = out + bias
        return out.to(x.dtype).reshape(*x.shape[:-1], out.shape[-1])


@torch.library.impl(_operators, "exact_int8_linear", "CPU")
def exact_int8_linear(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Return x @ weight.T, both int8, times the scales, as fp32 [tokens, out].

    ``x`` [tokens, in] with fp32 ``x_scale`` [tokens, 1]; ``weight`` [out, in] with fp32 ``scale`` [1, out].
    """
    x = x.float()
    out = x.new_empty(len(x), len(weight))
    memory, columns = _widened(), weight.shape[1]
    rows_at_once = len(memory) // columns
    for rows, part in zip(weight.split(rows_at_once), out.split(rows_at_once, dim=1), strict=True):
        widened = memory[: rows.numel()].view(-1, columns).copy_(rows)
        torch.mm(x, widened.t(), out=part)
    return out.mul_(x_scale).mul_(scale)


@torch.library.register_fake("flexquant::exact_int8_linear", lib=_operators)
def _exact_int8_linear_shape(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)


def _widened() -> torch.Tensor:
    """Return this thread's memory: two threads may multiply at once."""
    if not hasattr(_kept, "memory"):
        with torch.inference_mode(False):  # made inside that mode, it could not be written to outside of it
            _kept.memory = torch.empty(WIDENED_BYTES // 4, dtype=torch.float32)
    return _kept.memory
