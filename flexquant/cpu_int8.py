# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""W8A8 on CPUs whose INT8 arithmetic saturates: exact sums behind vLLM's kernel interface.

Without VNNI, oneDNN multiplies 8-bit pairs into 16-bit sums (``vpmaddubsw``), which overflow at +-32767 where
weights and activations are both large: a few percent of error in every linear, without a warning. 8-bit
integers are exact in fp32, and so are their products and, to 7 digits, the sums.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.model_executor.layers.quantization.utils.w8a8_utils import convert_to_channelwise


def int8_saturates() -> bool:
    """Whether vLLM's INT8 operator gives wrong sums on this CPU, tried on the largest 8-bit values."""
    x, weight = (torch.full((rows, 64), 127, dtype=torch.int8) for rows in (1, 16))  # [.., in]
    out, scales, x_scale = (torch.ones(shape, dtype=torch.float32) for shape in ((1, 16), (16, 1), (1, 1)))
    handler = ops.create_onednn_scaled_mm(weight.t(), scales, out.dtype, True, False, 32)
    ops.onednn_scaled_mm(handler, x, out, x_scale, None, None, None)
    return bool((out != 64 * 127 * 127).any())


class ExactCPUInt8LinearKernel(CPUInt8ScaledMMLinearKernel):
    """vLLM's kernel, but dynamic symmetric activations are multiplied in fp32; other schemes stay vLLM's."""

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.config.is_static_input_scheme or not self.config.input_symmetric:
            super().process_weights_after_loading(layer)
            return
        w_q_name, w_s_name, *_ = self.layer_param_names
        weight, scale = getattr(layer, w_q_name), getattr(layer, w_s_name)  # int8 [out, in], [out, 1]
        if not self.config.is_channelwise:
            scale = convert_to_channelwise(scale, layer.logical_widths)
        for name, value in ((w_q_name, weight.data), (w_s_name, scale.data.float().reshape(1, -1))):
            replace_parameter(layer, name, torch.nn.Parameter(value, requires_grad=False))
        self.linear_method = self._apply_weights_exactly

    def _apply_weights_exactly(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight, scale, *_ = self._get_layer_params(layer)
        quantized, x_scale, _ = ops.onednn_scaled_int8_quant(x.reshape(-1, x.shape[-1]), None, None, True)
        out = (quantized.float() @ weight.float().t()) * x_scale.reshape(-1, 1) * scale  # [tokens, out]
        if bias is not None:
            out = out + bias
        return out.to(x.dtype).reshape(*x.shape[:-1], out.shape[-1])
