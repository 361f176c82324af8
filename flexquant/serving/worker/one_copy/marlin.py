# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Multiply in INT8 on a GPU by weights that Marlin keeps in INT4 alone; on Blackwell in FP8.

A pointwise Triton kernel writes a layer's 8-bit weights into memory that all layers share, and vLLM's CUTLASS
product follows, which has no INT8 on Blackwell. Marlin keeps tiles of 16 inputs and 64 outputs: each of a
tile's 128 words holds eight values that one thread multiplies (``get_weight_perm`` in vLLM's
``marlin_utils_test.py`` is the same in Python).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.platforms import current_platform

from flexquant.serving.vllm_api import MarlinLinearKernel, get_scale_perms, tl, triton, unpack_cols
from flexquant.serving.vllm_api import _custom_ops as ops
from flexquant.serving.worker.one_copy.cpu import CHANNEL_SCALE, output_shape

ZERO, BIAS = "flexquant_zero", "flexquant_bias"
"""Names of further buffers of a layer: int8 [groups, outputs], and [outputs] in their order."""
MOST_INPUTS = 128
"""Largest number of inputs of the weights that one program of the kernel writes; it has 64 outputs."""
INTERLEAVED = (0, 2, 4, 6, 1, 3, 5, 7)
INT8, FP8 = torch.int8, torch.float8_e4m3fn
GREATEST = {INT8: 127.0, FP8: 448.0}
"""Greatest weight of each precision."""
BLACKWELL = 100
ROUNDS = tl.constexpr(12582912.0)
"""Added to a small float32, it rounds to the nearest integer, ties to even: the low byte of its bits."""
INTEGERS = tl.constexpr(8388608.0)
"""2 to the 23rd: from here to twice that, the low bits of a float32 are what it has above this number."""
INTEGER_BITS = tl.constexpr(0x4B000000)

_memory: dict[torch.device, torch.Tensor] = {}
_library = torch.library.Library("flexquant", "FRAGMENT")
_library.define(
    "one_copy_marlin_linear(Tensor x, Tensor packed, Tensor scale, Tensor? zero, Tensor channel_scale, "
    "Tensor? bias, ScalarType precision) -> Tensor"
)


@triton.jit
def _int4_to_8_bit(  # type: ignore[no-untyped-def]  # Triton tells the types itself
    packed,
    scale,
    zero,
    channel_scale,
    out,
    outputs,
    inputs,
    group,
    is_grouped: tl.constexpr,
    has_zero: tl.constexpr,
    is_integer: tl.constexpr,
    tiles: tl.constexpr,
):
    column = tl.program_id(0)
    first = tl.program_id(1) * tiles
    # Axes as the words lie: tile, output % 8, pair of inputs, output // 16.
    tile = first + tl.arange(0, tiles)[:, None, None, None]
    low = tl.arange(0, 8)[None, :, None, None]
    pair = tl.arange(0, 4)[None, None, :, None]
    block = tl.arange(0, 4)[None, None, None, :]
    place = tile * (outputs * 2) + column * 128 + low * 16 + pair * 4 + block
    word = tl.load(packed + place, mask=tile * 16 < inputs, other=0)
    of_group = first * 16 // group * outputs
    k = first * 16 + tl.arange(0, tiles * 16)[None, None, :]
    for half in tl.static_range(2):
        n = column * 64 + block * 16 + half * 8 + low
        if is_grouped:
            place = n // 64 * 64 + n % 8 * 8 + n % 64 // 8
        else:
            place = n // 32 * 32 + n % 8 // 2 * 8 + n % 32 // 8 * 2 + n % 2
        ratio = tl.load(scale + of_group + place).to(tl.float32)
        ratio = tl.div_rn(ratio, tl.load(channel_scale + n))
        if has_zero:
            middle = tl.load(zero + of_group + n).to(tl.float32) + INTEGERS
        else:
            middle = tl.full([1, 8, 1, 4], 8 + INTEGERS, tl.float32)
        even = tl.join(
            _weight(word, half * 2, middle, ratio, is_integer, out.dtype.element_ty),
            _weight(word, half * 2 + 1, middle, ratio, is_integer, out.dtype.element_ty),
        )
        odd = tl.join(
            _weight(word, half * 2 + 4, middle, ratio, is_integer, out.dtype.element_ty),
            _weight(word, half * 2 + 5, middle, ratio, is_integer, out.dtype.element_ty),
        )
        # From [tile, output % 8, pair, output // 16, upper half of 16 inputs, odd] to [outputs, inputs].
        weights = tl.permute(tl.join(even, odd), (1, 3, 0, 4, 2, 5))
        weights = tl.reshape(weights, (8, 4, tiles * 16))
        row = tl.arange(0, 8)[:, None, None] + tl.arange(0, 4)[None, :, None] * 16
        tl.store(out + (column * 64 + half * 8 + row) * inputs + k, weights, mask=k < inputs)


@triton.jit
def _weight(  # type: ignore[no-untyped-def]
    word, place: tl.constexpr, middle, ratio, is_integer: tl.constexpr, dtype: tl.constexpr
):
    """Return the 8-bit weights of one of a word's eight places, without a conversion between types."""
    value = (((word >> (4 * place)) & 15) | INTEGER_BITS).to(tl.float32, bitcast=True)
    exact = (value - middle) * ratio
    if is_integer:
        return (exact + ROUNDS).to(tl.int32, bitcast=True).to(tl.int8)
    return exact.to(dtype)


def eight_bit_weights(
    packed: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    channel_scale: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write the weights into ``out`` [outputs, inputs], in INT8 or FP8, and return it.

    ``packed`` int32 [inputs / 16, outputs * 2] and ``scale`` [groups, outputs] are as Marlin keeps them,
    ``zero`` [groups, outputs] and ``channel_scale`` float32 [outputs] are in the order of outputs. In INT8 a
    weight is (value - zero) * (scale / channel_scale), each operation rounded to the nearest float32, and
    then to the nearest integer, ties to even: a fused multiply-add, which rounds once, would differ.
    """
    outputs, inputs = out.shape
    group = inputs // len(scale)
    tiles = min(group, MOST_INPUTS) // 16
    _int4_to_8_bit[(outputs // 64, triton.cdiv(inputs, tiles * 16))](
        packed,
        scale,
        scale if zero is None else zero,
        channel_scale,
        out,
        outputs,
        inputs,
        group,
        is_grouped=len(scale) > 1,
        has_zero=zero is not None,
        is_integer=out.dtype == INT8,
        tiles=tiles,
        num_warps=max(1, tiles // 2),
        enable_fp_fusion=False,
    )
    return out


def in_order_of_outputs(scale: torch.Tensor) -> torch.Tensor:
    """Return Marlin's scales [groups, outputs] of a layer in the order of outputs."""
    grouped, single = get_scale_perms()
    return _permuted_back(scale, grouped if len(scale) > 1 else single)


def zeros_in_order_of_outputs(zero: torch.Tensor, groups: int, outputs: int) -> torch.Tensor:
    """Return Marlin's packed zero points as int8 [groups, outputs]."""
    values = _permuted_back(unpack_cols(zero, 4, groups, outputs), INTERLEAVED)
    return _permuted_back(values, get_scale_perms()[0]).to(torch.int8)


def _permuted_back(values: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return ``values`` [.., outputs] as before each ``len(order)`` outputs were permuted so."""
    back = torch.tensor(order, device=values.device).argsort()
    return values.unflatten(-1, (-1, len(order)))[..., back].flatten(-2)


def marlin_channel_scales(
    packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, precision: torch.dtype
) -> torch.Tensor:
    """Return the scales of 8-bit weights, float32 [outputs], by each channel's greatest weight."""
    groups, outputs = scale.shape
    inputs = packed.numel() * 8 // outputs
    ones = torch.ones_like(scale, dtype=torch.float32)
    out = _scratch(packed.device, inputs * outputs, INT8).view(outputs, inputs)
    values = eight_bit_weights(packed, ones, zero, ones[0], out)  # value - zero, exactly
    most = values.view(outputs, groups, -1).abs().amax(2).float()
    greatest = (most * in_order_of_outputs(scale).float().abs().t()).amax(1)
    return torch.where(greatest > 0, greatest / GREATEST[precision], 1.0)


class MarlinProduct:
    """Multiplies in 8 bit by the weights of a layer that ``kernel`` keeps in INT4."""

    def __init__(self, kernel: MarlinLinearKernel) -> None:
        self._kernel = kernel
        self._precision = FP8 if current_platform.has_device_capability(BLACKWELL) else INT8
        self.precision = "FP8" if self._precision == FP8 else "INT8"

    def prepare(self, layer: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the buffers that the layer's view needs, once its weights are packed."""
        packed, scale, zero, *_ = self._kernel._get_weight_params(layer)
        buffers = {}
        if self._kernel.config.zero_points and zero is not None:
            buffers[ZERO] = zeros_in_order_of_outputs(zero, *scale.shape)
        buffers[CHANNEL_SCALE] = marlin_channel_scales(packed, scale, buffers.get(ZERO), self._precision)
        if (bias := getattr(layer, "bias", None)) is not None:
            buffers[BIAS] = _permuted_back(bias, get_scale_perms()[1])
        return buffers

    def multiply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return [tokens, outputs] for ``x`` [tokens, inputs], in its dtype; ``bias`` is the layer's."""
        packed, scale, *_ = self._kernel._get_weight_params(layer)
        buffers = layer._buffers
        bias = None if bias is None else buffers[BIAS]
        out: torch.Tensor = torch.ops.flexquant.one_copy_marlin_linear(
            x, packed, scale, buffers.get(ZERO), buffers[CHANNEL_SCALE], bias, self._precision
        )
        return out


@torch.library.impl(_library, "one_copy_marlin_linear", "CUDA")
def one_copy_marlin_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    channel_scale: torch.Tensor,
    bias: torch.Tensor | None,
    precision: torch.dtype,
) -> torch.Tensor:
    """Return [tokens, outputs] for ``x`` [tokens, inputs], quantised per token and multiplied in 8 bit."""
    outputs, inputs = scale.shape[1], x.shape[1]
    out = _scratch(x.device, inputs * outputs, precision).view(outputs, inputs)
    weights = eight_bit_weights(packed, scale, zero, channel_scale, out)
    if precision == FP8:
        quantized, row = ops.scaled_fp8_quant(x.contiguous(), use_per_token_if_dynamic=True)
    else:
        quantized, row, _ = ops.scaled_int8_quant(x.contiguous(), None, None, symmetric=True)
    return ops.cutlass_scaled_mm(quantized, weights.t(), row, channel_scale[:, None], x.dtype, bias)


torch.library.register_fake("flexquant::one_copy_marlin_linear", output_shape, lib=_library)


def _scratch(device: torch.device, weights: int, precision: torch.dtype) -> torch.Tensor:
    """Return memory for a layer's weights; it grows while layers are prepared, and never in a pass."""
    if device not in _memory or _memory[device].numel() < weights:
        _memory[device] = torch.empty(weights, dtype=INT8, device=device)
    return _memory[device][:weights].view(precision)
