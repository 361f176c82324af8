# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Multiply 16-bit activations by INT4 or INT8 weights on a CPU: by PyTorch's operators, or by faster loops.

The loops are in weight_only.cpp. INT8 weights, for which vLLM has no kernel, have a scale an output. They lie
in blocks, [outputs / width, inputs, width] (width 1 without the loops), where an embedding can look up rows
too.
"""

import functools
import threading
from abc import abstractmethod

import torch

from flexquant.serving.kernels.cpu_loops import has_loops, thread_memory
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
WIDTH = 32
"""Outputs of a block of INT8 weights, as weight_only.cpp has them."""
MOST_TOKENS = 8
"""Most tokens that the loop in float32 takes."""
TOKENS_BEFORE_AMX = 32
"""Most tokens for which the loops are used on a CPU with AMX, which oneDNN's product has."""
TOKENS_WITHOUT_LOOPS = 4
"""Most tokens for PyTorch's product for INT8, which takes as long for each token as for the first."""
SLICE = 1 << 20
"""Numbers of a slice of INT8 weights in 16 or 32 bit."""

_wide = threading.local()
_library = torch.library.Library("flexquant", "FRAGMENT")
_library.define("w8a16_linear(Tensor x, Tensor weight, Tensor scale) -> Tensor")


class CPUWeightOnlyLinearKernel(MPLinearKernel):
    """A kernel for every CPU."""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = self._multiply(layer, x.reshape(-1, x.shape[-1]))
        return (out if bias is None else out + bias).reshape(*x.shape[:-1], out.shape[-1])

    @abstractmethod
    def _multiply(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return [tokens, out] for ``x`` [tokens, in], in its dtype."""

    def _replace(self, layer: torch.nn.Module, weight: torch.Tensor, scale: torch.Tensor) -> None:
        for name, value in ((self.w_q_name, weight), (self.w_s_name, scale)):
            replace_parameter(layer, name, torch.nn.Parameter(value, requires_grad=False))


class TorchCPUInt4LinearKernel(CPUWeightOnlyLinearKernel):
    """Group-wise INT4 weights, by ATen's ``_weight_int4pack_mm_for_cpu`` for AVX2 and AVX512."""

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
        self._replace(layer, weight, scale_and_zero)

    def _multiply(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        weight, scale_and_zero, *_ = self._get_weight_params(layer)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, weight, self.config.group_size, scale_and_zero.to(x.dtype)
        )


class FlexQuantCPUInt4LinearKernel(TorchCPUInt4LinearKernel):
    """The same weights, multiplied by the loop: activations in bfloat16, and sums in fp32.

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
    name = "flexquant_weight_only::multiply_int4"
    torch.library.register_fake(name, lambda x, _, scales: x.new_empty((x.shape[0], scales.shape[1])))
    return True


class CPUW8A16LinearKernel(CPUWeightOnlyLinearKernel):
    """INT8 weights with one scale an output, and activations in 16 or 32 bit."""

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
        self._replace(layer, blocks, scale.data.float().flatten())

    def _multiply(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        weight, scale, *_ = self._get_weight_params(layer)
        out: torch.Tensor = torch.ops.flexquant.w8a16_linear(x, weight, scale)
        return out

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
