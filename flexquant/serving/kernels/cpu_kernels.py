# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Provide linear kernels for CPUs where vLLM's own are missing, wrong, or of another precision.

- A stand-in for W4A8.
- vLLM's INT4 kernels for CPUs with AVX512, its own and AMD's, each held to one precision. vLLM runs all
  W4A16 layers of a process as W4A8 if it has a kernel and ``VLLM_CPU_INT4_W4A8`` is not 0.
- W8A8 for CPUs without VNNI. There oneDNN adds products of 8-bit pairs in 16 bits (``vpmaddubsw``), which
  overflows without a warning: every linear has a few percent of error. In fp32, 8-bit integers and their
  products are exact, and sums are exact to 7 digits.

:func:`provide_cpu_kernels` puts them in the place of vLLM's, each with a condition for deleting it.
"""

import dataclasses
import functools
import os
import platform
import threading
from typing import ClassVar

import torch
from vllm.platforms import PlatformEnum, current_platform

from flexquant.errors import FlexQuantError
from flexquant.serving.kernels.cpu_loops import thread_memory
from flexquant.serving.kernels.cpu_weight_only import CPUW8A16LinearKernel, TorchCPUInt4LinearKernel
from flexquant.serving.kernels.layers import LinearKernel
from flexquant.serving.vllm_api import (
    CPUInt8ScaledMMLinearKernel,
    CPUWNA16LinearKernel,
    MPLinearLayerConfig,
    ZentorchWNA16LinearKernel,
    envs,
    register_linear_kernel,
    scalar_types,
)
from flexquant.serving.vllm_api import _custom_ops as ops

W4A16_IN = torch.float16
"""Dtype of activations for which vLLM has no W4A8 on a CPU; its W4A16 kernels accept any 16-bit dtype."""
W4A8_IN = torch.bfloat16
"""Dtype of activations for which vLLM has W4A8 on a CPU."""
WIDENED_BYTES = 8 << 20
"""Bytes of a thread's buffer for fp32 weights: allocating it in every linear of every pass would take several
times as long as the multiplication."""
REPLACED: dict[str, type[LinearKernel]] = {}
"""Name of a vLLM kernel that is replaced in this process -> its replacement."""

_kept = threading.local()
_operators = torch.library.Library("flexquant", "FRAGMENT")
_operators.define("exact_int8_linear(Tensor x, Tensor x_scale, Tensor weight, Tensor scale) -> Tensor")


class TorchCPUW4A8LinearKernel(TorchCPUInt4LinearKernel):
    """A stand-in that rounds activations as W4A8 does, and multiplies in 16 bit: slower than W4A16."""

    def _multiply(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        quantized, x_scale, _ = ops.onednn_scaled_int8_quant(x, None, None, True)  # .., [tokens, 1]
        return (super()._multiply(layer, quantized.to(torch.bfloat16)) * x_scale).to(x.dtype)


class HeldToOnePrecision:
    """Tells vLLM's kernel the dtype of activations that makes it choose the wanted precision."""

    of: ClassVar[str]
    """vLLM's name of the kernel, with which ``VLLM_DISABLED_KERNELS`` can disable it."""
    act_type: ClassVar[torch.dtype]

    def __init__(self, c: MPLinearLayerConfig, *names: str | None) -> None:
        super().__init__(dataclasses.replace(c, act_type=self.act_type), *names)  # type: ignore[call-arg]
        torch.cpu._init_amx()  # Linux ends a process that uses AMX unasked; oneDNN asks at its first product


class CPUW4A16LinearKernel(HeldToOnePrecision, CPUWNA16LinearKernel):
    """``cpu_gemm_wna16``, which has code for AVX512 and for AMX."""

    of, act_type = "CPUWNA16LinearKernel", W4A16_IN


class AMXW4A8LinearKernel(HeldToOnePrecision, CPUWNA16LinearKernel):
    """``int4_scaled_mm_cpu``, for AMX."""

    of, act_type = "CPUWNA16LinearKernel", W4A8_IN

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        if not torch.cpu._is_amx_tile_supported():
            return False, "this CPU has no AMX"
        return w4a8_problem(c) or super().can_implement(c)


class ZentorchW4A16LinearKernel(HeldToOnePrecision, ZentorchWNA16LinearKernel):
    """W4A16 by ``zentorch_woq_linear``."""

    of, act_type = "ZentorchWNA16LinearKernel", W4A16_IN


class ZentorchW4A8LinearKernel(HeldToOnePrecision, ZentorchWNA16LinearKernel):
    """W4A8 by ``zentorch_dynamic_qlinear`` on INT4 weights, in vLLM 0.31 and later."""

    of, act_type = "ZentorchWNA16LinearKernel", W4A8_IN

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        if not hasattr(cls, "_maybe_process_da8w4_weights"):
            return False, "this vLLM has no W4A8 for zentorch; update it to 0.31 or later"
        group = c.partition_weight_shape[0] if c.group_size == -1 else c.group_size
        if group % 4:
            return False, f"group size {group} is no multiple of 4"
        return w4a8_problem(c) or super().can_implement(c)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        super().process_weights_after_loading(layer)
        if not getattr(layer, "_zentorch_da8w4", False):
            advice = f"set VLLM_DISABLED_KERNELS={type(self).__name__} to have another kernel"
            raise FlexQuantError(f"vLLM did not make W4A8 of a layer for zentorch; {advice}")

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return [..., out] for ``x`` [..., in]; one token is computed as two, which is faster."""
        flat = x.reshape(-1, x.shape[-1])
        alone = len(flat) == 1
        out = super().apply_weights(layer, flat.expand(2, -1).contiguous() if alone else flat, bias)
        return out[: len(flat)].to(x.dtype).reshape(*x.shape[:-1], out.shape[-1])


def w4a8_problem(c: MPLinearLayerConfig) -> tuple[bool, str] | None:
    """Return why a layer cannot have vLLM's W4A8 on a CPU, in ``can_implement``'s form; None if it can."""
    if not envs.VLLM_CPU_INT4_W4A8:
        return False, "VLLM_CPU_INT4_W4A8=0 turns it off"
    if c.weight_type != scalar_types.uint4b8 or c.zero_points:
        return False, f"only symmetric INT4 is supported, not {c.weight_type}"
    return None


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
    """vLLM's kernel with fp32 products; activations are quantised as vLLM does, in each of its schemes."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        w_q_name, w_s_name, *_ = self.layer_param_names
        weight = getattr(layer, w_q_name).data  # int8 [out, in]
        super().process_weights_after_loading(layer)  # which makes one scale and zero point of static ones
        del self.dnnl_handler  # holds the weights, packed
        scale = getattr(layer, w_s_name).data.float()
        for name, value in ((w_q_name, weight), (w_s_name, scale.expand(len(weight), 1).reshape(1, -1))):
            setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))
        self.linear_method = self._apply_weights_exactly

    def _apply_weights_exactly(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight, scale, of_inputs, zero_of_inputs, _ = self._get_layer_params(layer)
        flat, is_symmetric = x.reshape(-1, x.shape[-1]), self.config.input_symmetric
        quantized, x_scale, zero = ops.onednn_scaled_int8_quant(flat, of_inputs, zero_of_inputs, is_symmetric)
        if zero is not None:
            quantized = quantized.int() - zero
        out = torch.ops.flexquant.exact_int8_linear(quantized, x_scale, weight, scale)
        return (out if bias is None else out + bias).to(x.dtype).reshape(*x.shape[:-1], out.shape[-1])


@torch.library.impl(_operators, "exact_int8_linear", "CPU")
def exact_int8_linear(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Return x @ weight.T, times the scales, as fp32 [tokens, out], for int8 or int32 ``x`` [tokens, in].

    ``x_scale`` is fp32 [tokens, 1] or one number, ``weight`` int8 [out, in], ``scale`` fp32 [1, out].
    """
    x = x.float()
    out = x.new_empty(len(x), len(weight))
    memory, columns = thread_memory(_kept, WIDENED_BYTES // 4, torch.float32), weight.shape[1]
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


@functools.cache
def provide_cpu_kernels() -> None:
    """Provide W4A16 and W8A8 kernels, in this process, on a CPU for which vLLM's own are missing or wrong."""
    if not current_platform.is_cpu():
        return
    # vLLM's CPUWNA16LinearKernel (0.26 and 0.32) accepts every layer, and fails at the first forward pass on
    # a CPU without AVX512. Delete this once the oldest supported vLLM has the operator for AVX2 too.
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        _replace("CPUWNA16LinearKernel", TorchCPUInt4LinearKernel, "mp")
    # vLLM (0.26 and 0.32) has no kernel for INT8 weights alone on CPUs. Delete this once the oldest has one.
    register_linear_kernel(CPUW8A16LinearKernel, PlatformEnum.CPU, "mp")
    if platform.machine() not in ("x86_64", "AMD64"):
        return
    # vLLM's CPUInt8ScaledMMLinearKernel (0.26 and 0.32) passes s8 x s8 to oneDNN, which saturates without
    # VNNI. Delete this once it does not for the oldest supported vLLM.
    if int8_saturates():
        _replace("CPUInt8ScaledMMLinearKernel", ExactCPUInt8LinearKernel, "int8")
    # With AMX the kernel's operator takes only [tokens, in], while models that vLLM runs through transformers
    # pass [1, tokens, in]. Delete this once the oldest supported vLLM reshapes them, as it does for oneDNN.
    elif torch.cpu._is_amx_tile_supported():
        _replace("CPUInt8ScaledMMLinearKernel", AnyShapeCPUInt8LinearKernel, "int8")


def _replace(name: str, kernel: type[LinearKernel], kind: str) -> None:
    disabled = os.environ.get("VLLM_DISABLED_KERNELS", "")
    os.environ["VLLM_DISABLED_KERNELS"] = ",".join(filter(None, [disabled, name]))
    register_linear_kernel(kernel, PlatformEnum.CPU, kind)
    REPLACED[name] = kernel
