# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Multiply activations in 16 bit by INT8 weights on a CPU, for which vLLM has no kernel.

Weights have one scale an output. They lie in blocks of outputs, [outputs / width, inputs, width], in which an
embedding can look up rows too. Without the compiled loops a block is one output.
"""

from __future__ import annotations

import threading

import torch

from flexquant.serving.kernels.cpu_loops import has_loops, thread_memory
from flexquant.serving.vllm_api import (
    MPLinearKernel,
    MPLinearLayerConfig,
    replace_parameter,
    scalar_types,
    unpack_quantized_values_into_int32,
)

WIDTH = 32
"""Outputs of a block, as weight_only.cpp has them."""
MOST_TOKENS = 8
"""Most tokens that the loop in float32 takes."""
TOKENS_BEFORE_AMX = 32
"""Most tokens for which the loops are used on a CPU with AMX, which oneDNN's product has."""
TOKENS_WITHOUT_LOOPS = 4
"""Most tokens for PyTorch's product for INT8, which takes as long for each token as for the first."""
SLICE = 1 << 20
"""Numbers of a slice of weights in 16 or 32 bit."""

_wide = threading.local()
_library = torch.library.Library("flexquant", "FRAGMENT")
_library.define("w8a16_linear(Tensor x, Tensor weight, Tensor scale) -> Tensor")


class CPUW8A16LinearKernel(MPLinearKernel):
    """INT8 weights with one scale an output, and activations in 16 or 32 bit."""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        inputs, outputs = c.partition_weight_shape
        if c.weight_type != scalar_types.uint8b128 or c.zero_points or getattr(c, "has_g_idx", False):
            return False, f"only symmetric INT8 is supported, not {c.weight_type}"
        if c.group_size not in (-1, c.full_weight_shape[0]):
            return False, f"only one scale an output is supported, not groups of {c.group_size}"
        if outputs % WIDTH or inputs % 2:
            return False, f"{inputs} inputs and {outputs} outputs are no multiples of 2 and {WIDTH}"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        packed, scale, *_ = self._get_weight_params(layer)
        if getattr(packed, "packed_dim", 1) == 0:  # GPTQ's, [inputs / 4, outputs]
            values = unpack_quantized_values_into_int32(packed.data, self.config.weight_type, 0)
            weight, scale = values.t().sub(128).to(torch.int8), scale.t()
        else:
            weight = packed.data.contiguous().view(torch.uint8).bitwise_xor(128).view(torch.int8)
        width = WIDTH if has_loops() else 1
        blocks = weight.unflatten(0, (-1, width)).transpose(1, 2).contiguous()
        for name, value in ((self.w_q_name, blocks), (self.w_s_name, scale.data.float().flatten())):
            replace_parameter(layer, name, torch.nn.Parameter(value, requires_grad=False))

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight, scale, *_ = self._get_weight_params(layer)
        out: torch.Tensor = torch.ops.flexquant.w8a16_linear(x.reshape(-1, x.shape[-1]), weight, scale)
        return (out if bias is None else out + bias).reshape(*x.shape[:-1], out.shape[-1])

    def rows(self, layer: torch.nn.Module, numbers: torch.Tensor) -> torch.Tensor:
        """Return the weights of the outputs with these ``numbers``, in any shape: [..., inputs], float32."""
        weight, scale, *_ = self._get_weight_params(layer)
        width = weight.shape[2]
        return weight[numbers // width, :, numbers % width] * scale[numbers][..., None]


@torch.library.impl(_library, "w8a16_linear", "CPU")
def w8a16_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return [tokens, outputs] for ``x`` [tokens, inputs], in its dtype.

    ``weight`` is int8 [outputs / width, inputs, width], ``scale`` float32 [outputs].
    """
    tokens = len(x)
    if weight.shape[2] == 1:
        if 0 < tokens <= TOKENS_WITHOUT_LOOPS:
            return torch.ops.aten._weight_int8pack_mm(x.contiguous(), weight[..., 0], scale.to(x.dtype))
        return _in_slices(x, weight, scale)
    loops = torch.ops.flexquant_weight_only
    if x.dtype == torch.bfloat16 and hasattr(loops, "multiply_many"):
        if tokens <= TOKENS_BEFORE_AMX or not torch.cpu._is_amx_tile_supported():
            return loops.multiply_many(x, weight, scale)
    elif 0 < tokens <= MOST_TOKENS:
        return loops.multiply(x, weight, scale)
    return _in_slices(x, weight, scale)


def _in_slices(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the same by PyTorch's products, in ``x``'s dtype or float32, a slice at a time."""
    is_fast = x.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    numbers = x if is_fast else x.float()
    blocks, inputs, width = weight.shape
    step = max(1, SLICE // (inputs * width))
    memory = thread_memory(_wide, step * inputs * width, torch.float32).view(numbers.dtype)
    out = x.new_empty(len(x), blocks * width)
    columns = step * width
    for some, of_some, part in zip(
        weight.split(step), scale.split(columns), out.split(columns, 1), strict=True
    ):
        wide = memory[: some.numel()].view(inputs, -1)
        if width > 1:
            torch.ops.flexquant_weight_only.widen(some, wide)
        else:
            wide.copy_(some[..., 0].t())
        part.copy_(torch.mm(numbers, wide).float().mul_(of_some))
    return out


@torch.library.register_fake("flexquant::w8a16_linear", lib=_library)
def _output_shape(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0], scale.shape[0]))
