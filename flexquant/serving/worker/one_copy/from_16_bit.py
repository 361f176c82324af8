# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How a linear with weights in 16 bit computes in 8 bit: the weights are rounded with one scale an output.

vLLM's operators that quantise a token's activations quantise a weight's row. On a GPU each pass does so, into
memory that all layers share. On a CPU vLLM keeps 16-bit weights in oneDNN's layout alone, so that the start
makes a copy in INT8, for vLLM's kernel of W8A8.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from vllm.platforms import current_platform

from flexquant.serving.kernels.layers import linear_sizes
from flexquant.serving.vllm_api import LinearBase, UnquantizedLinearMethod, init_int8_linear_kernel
from flexquant.serving.vllm_api import _custom_ops as ops
from flexquant.serving.worker.one_copy.methods import OneCopyMethod
from flexquant.serving.worker.one_copy.product import register_operator

MULTIPLE = 16
"""Inputs and outputs of which vLLM's product for GPUs takes multiples."""


def is_readable(layer: LinearBase) -> bool:
    """Whether a linear is in 16 bit, and of sizes that can be multiplied in 8 bit."""
    is_in_16_bit = isinstance(layer.quant_method, UnquantizedLinearMethod)
    return is_in_16_bit and not any(size % MULTIPLE for size in linear_sizes(layer))


def method_for(source: LinearBase, precision: str) -> OneCopyMethod:
    """Return the method of a view of ``source``, whose weights are not loaded; ``precision``: int8 or fp8."""
    if not current_platform.is_cpu():
        return RoundingMethod(precision)
    if not isinstance(source.quant_method, WithInt8Copy):
        source.quant_method = WithInt8Copy()
    return Int8CopyMethod(source.quant_method)


class RoundingMethod(OneCopyMethod):
    """Rounds the weights in each pass, on a GPU."""

    def __init__(self, precision: str) -> None:
        from flexquant.serving.worker.one_copy.gpu import FP8, eight_bit_type

        self._type = eight_bit_type(precision)
        self.kernel_name = f"{'FP8' if self._type == FP8 else 'INT8'} from 16 bit"

    def make_ready(self, layer: LinearBase) -> None:
        from flexquant.serving.worker.one_copy.gpu import scratch

        weight = layer.get_parameter("weight")
        scratch(weight.device, weight.numel(), self._type)

    def multiply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        weight = layer._parameters["weight"]
        out: Tensor = torch.ops.flexquant.linear_from_16_bit(x, weight, bias, self._type)
        return out


class WithInt8Copy(UnquantizedLinearMethod):
    """Computes in 16 bit, as vLLM does on a CPU, and keeps a copy of the weights in INT8."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = init_int8_linear_kernel(
            is_channelwise=True, is_static_input_scheme=False, input_symmetric=True, module_name="FlexQuant"
        )
        self.copy = nn.Module()

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight, scales, _ = ops.scaled_int8_quant(layer.get_parameter("weight").data)
        for name, value in (("weight", weight), ("weight_scale", scales)):
            self.copy.register_parameter(name, nn.Parameter(value, requires_grad=False))
        for name in ("input_scale", "input_zero_point", "azp_adj"):
            self.copy.register_parameter(name, None)
        vars(self.copy).update(logical_widths=[len(weight)], bias=getattr(layer, "bias", None))
        self.kernel.process_weights_after_loading(self.copy)
        super().process_weights_after_loading(layer)


class Int8CopyMethod(OneCopyMethod):
    """Multiplies by the copy in INT8 that the method of its source has made."""

    def __init__(self, source: WithInt8Copy) -> None:
        self._source = source
        self.kernel_name = f"{type(source.kernel).__name__} on a copy from 16 bit"

    def nbytes(self, layer: LinearBase) -> tuple[int, int]:
        inputs, outputs = linear_sizes(layer)
        return 0, (inputs + 4) * outputs

    def multiply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = self._source.kernel.apply_weights(self._source.copy, x, bias)
        return out


def linear_from_16_bit(x: Tensor, weight: Tensor, bias: Tensor | None, precision: torch.dtype) -> Tensor:
    """Return [tokens, outputs] for ``x`` [tokens, inputs], quantised per token and multiplied in 8 bit."""
    from flexquant.serving.worker.one_copy.gpu import FP8, multiply_in_8_bit, scratch

    out = scratch(weight.device, weight.numel(), precision).view_as(weight)
    if precision == FP8:
        _, scales = ops.scaled_fp8_quant(weight, output=out, use_per_token_if_dynamic=True)
    else:
        scales = torch.empty(len(weight), 1, dtype=torch.float32, device=weight.device)
        torch.ops._C.dynamic_scaled_int8_quant(out, weight, scales, None)
    return multiply_in_8_bit(x, out, scales[:, 0], bias)


def _output(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


register_operator(linear_from_16_bit, "CUDA", _output)
