# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Multiply in INT8 on a GPU by weights that are kept in INT4 alone; on Blackwell in FP8.

A pointwise Triton kernel writes a layer's 8-bit weights into memory that all layers share, and vLLM's CUTLASS
product follows, which has no INT8 on Blackwell. The INT4 weights are Marlin's or Humming's, which has
Marlin's layout: tiles of 16 inputs and 64 outputs, in which each of 128 words holds eight values that one
thread multiplies (``get_weight_perm`` in vLLM's ``marlin_utils_test.py``, ``weight_repack_nk`` in Humming's
``process.cuh``). Where the two differ is in :class:`Layout`; which holds is tried on a small weight.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm.platforms import current_platform

from flexquant.serving.kernels.layers import kernel_of_layer
from flexquant.serving.kernels.trial import new_layer, ready
from flexquant.serving.vllm_api import (
    HummingLinearKernel,
    MarlinLinearKernel,
    MPLinearKernel,
    MPLinearLayerConfig,
    get_scale_perms,
    tl,
    triton,
    unpack_cols,
    unpack_quantized_values_into_int32,
)
from flexquant.serving.vllm_api import _custom_ops as ops
from flexquant.serving.worker.one_copy.cpu import CHANNEL_SCALE

ZERO, INVERSE, BIAS = "flexquant_zero", "flexquant_inverse_scale", "flexquant_bias"
"""Names of further buffers of a layer: int8 [groups, outputs], and twice [outputs], in their order."""
MOST_INPUTS = 128
"""Largest number of inputs of the weights that one program of the kernel writes; it has 64 outputs."""
INT8, FP8 = torch.int8, torch.float8_e4m3fn
GREATEST = {INT8: 127.0, FP8: 448.0}
"""Greatest weight of each precision."""
BLACKWELL = 100
ROUNDS = tl.constexpr(12582912.0)
"""Added to a small float32, it rounds to the nearest integer, ties to even: the low byte of its bits."""
INTEGERS = tl.constexpr(8388608.0)
"""2 to the 23rd: from here to twice that, the low bits of a float32 are what it has above this number."""
INTEGER_BITS = 0x4B000000
"""The bits of that number. The kernel gets them as an argument: one instruction takes one constant."""

_memory: dict[torch.device, torch.Tensor] = {}
_library = torch.library.Library("flexquant", "FRAGMENT")
_library.define(
    "one_copy_gpu_linear(Tensor x, Tensor packed, Tensor scale, Tensor? zero, Tensor inverse, "
    "Tensor channel_scale, Tensor? bias, ScalarType precision, bool outputs_first) -> Tensor"
)


@dataclass(frozen=True)
class Layout:
    """How an INT4 kernel keeps a layer's weights, packed int32 [inputs / 16, outputs * 2]."""

    names: tuple[str, str, str] | None
    """Names of a layer's weights, scales and zero points; None: those that the kernel has for them."""
    outputs_first: bool
    """Whether a word's places 0 and 1 are inputs i and i + 8 of one output; else outputs o and o + 8."""
    zeros: tuple[int, ...]
    """The output of each of eight zero points of a word."""
    multiples: tuple[tuple[int, int], ...]
    """Outputs and inputs of which the kernel takes multiples; it pads weights with others."""

    def tensors(
        self, kernel: MPLinearKernel, layer: torch.nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the packed weights, the scales [groups, outputs] as kept, and zero points in their order."""
        if self.names is None:
            packed, scale, zero, *_ = kernel._get_weight_params(layer)
        else:
            packed, scale, zero = (getattr(layer, name, None) for name in self.names)
        if not kernel.config.zero_points or zero is None:
            return packed, scale, None
        return packed, scale, zeros_in_order_of_outputs(zero, *scale.shape, self.zeros)


INTERLEAVED = (0, 2, 4, 6, 1, 3, 5, 7)
MARLIN = Layout(None, True, INTERLEAVED, ((64, 128), (128, 64)))
HUMMING = tuple(
    Layout(("weight", "weight_scale", "zero_point"), outputs_first, tuple(range(8)), ((256, 128),))
    for outputs_first in (True, False)
)
"""Humming's layouts: before 0.1.17 for Hopper's own instructions the second one, else the first."""


@triton.jit
def _int4_to_8_bit(  # type: ignore[no-untyped-def]  # Triton tells the types itself
    packed,
    scale,
    zero,
    inverse,
    out,
    outputs,
    inputs,
    group,
    integer_bits,
    is_grouped: tl.constexpr,
    has_zero: tl.constexpr,
    is_integer: tl.constexpr,
    outputs_first: tl.constexpr,
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
        ratio = ratio * tl.load(inverse + n)
        if has_zero:
            middle = tl.load(zero + of_group + n).to(tl.float32)
        else:
            middle = tl.full([1, 8, 1, 4], 8, tl.float32)
        lower, upper = (half * 2, half * 2 + 1) if outputs_first else (half, half + 2)
        even = tl.join(
            _weight(word, lower, middle, ratio, integer_bits, is_integer, out.dtype.element_ty),
            _weight(word, upper, middle, ratio, integer_bits, is_integer, out.dtype.element_ty),
        )
        odd = tl.join(  # the places 4 to 7 would reach into the exponent
            _weight(word >> 12, lower + 1, middle, ratio, integer_bits, is_integer, out.dtype.element_ty),
            _weight(word >> 12, upper + 1, middle, ratio, integer_bits, is_integer, out.dtype.element_ty),
        )
        # From [tile, output % 8, pair, output // 16, upper half of 16 inputs, odd] to [outputs, inputs].
        weights = tl.permute(tl.join(even, odd), (1, 3, 0, 4, 2, 5))
        weights = tl.reshape(weights, (8, 4, tiles * 16))
        row = tl.arange(0, 8)[:, None, None] + tl.arange(0, 4)[None, :, None] * 16
        tl.store(out + (column * 64 + half * 8 + row) * inputs + k, weights, mask=k < inputs)


@triton.jit
def _weight(  # type: ignore[no-untyped-def]
    word, place: tl.constexpr, middle, ratio, integer_bits, is_integer: tl.constexpr, dtype: tl.constexpr
):
    """Return the 8-bit weights of a word's place, 0 to 4, without a conversion between types.

    The place stays where it is in the word, so a weight has the factor 16 to the place, and its ratio the
    inverse: both are exact.
    """
    value = ((word & (15 << (4 * place))) | integer_bits).to(tl.float32, bitcast=True)
    exact = (value - (middle * (1 << (4 * place)) + INTEGERS)) * (ratio * (1.0 / (1 << (4 * place))))
    if is_integer:
        return (exact + ROUNDS).to(tl.int32, bitcast=True).to(tl.int8)
    return exact.to(dtype)


def eight_bit_weights(
    packed: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    inverse: torch.Tensor,
    out: torch.Tensor,
    outputs_first: bool,
) -> torch.Tensor:
    """Write the weights into ``out`` [outputs, inputs], in INT8 or FP8, and return it.

    ``packed`` int32 [inputs / 16, outputs * 2] and ``scale`` [groups, outputs] are as the kernel keeps them,
    ``zero`` [groups, outputs] and ``inverse`` float32 [outputs], of the scales of 8-bit weights, are in the
    order of outputs. In INT8 a weight is (value - zero) * (scale * inverse), each operation rounded to the
    nearest float32, and then to the nearest integer, ties to even: a fused multiply-add, which rounds once,
    would differ.
    """
    outputs, inputs = out.shape
    group = inputs // len(scale)
    tiles = min(group, MOST_INPUTS) // 16
    _int4_to_8_bit[(outputs // 64, triton.cdiv(inputs, tiles * 16))](
        packed,
        scale,
        scale if zero is None else zero,
        inverse,
        out,
        outputs,
        inputs,
        group,
        INTEGER_BITS,
        is_grouped=len(scale) > 1,
        has_zero=zero is not None,
        is_integer=out.dtype == INT8,
        outputs_first=outputs_first,
        tiles=tiles,
        num_warps=max(1, tiles // 4),
        enable_fp_fusion=False,
    )
    return out


def in_order_of_outputs(scale: torch.Tensor) -> torch.Tensor:
    """Return a layer's scales [groups, outputs], as Marlin and Humming keep them, in the order of outputs."""
    grouped, single = get_scale_perms()
    return _permuted_back(scale, grouped if len(scale) > 1 else single)


def zeros_in_order_of_outputs(
    zero: torch.Tensor, groups: int, outputs: int, order: Sequence[int]
) -> torch.Tensor:
    """Return packed zero points, of which a word holds eight in an ``order``, as int8 [groups, outputs]."""
    values = _permuted_back(unpack_cols(zero, 4, groups, outputs), order)
    return _permuted_back(values, get_scale_perms()[0]).to(torch.int8)


def _permuted_back(values: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return ``values`` [.., outputs] as before each ``len(order)`` outputs were permuted so."""
    back = torch.tensor(order, device=values.device).argsort()
    return values.unflatten(-1, (-1, len(order)))[..., back].flatten(-2)


def layout_of(kind: type[MPLinearKernel], config: MPLinearLayerConfig) -> Layout | None:
    """Return how a kind of kernel keeps a layer's weights, without padding; None if it is not known."""
    inputs, outputs = config.partition_weight_shape
    dtype = str(config.act_type).removeprefix("torch.")
    layout = layout_found(kind, config.group_size, config.zero_points, dtype)
    fits = layout and any(outputs % n == 0 and inputs % k == 0 for n, k in layout.multiples)
    return layout if fits else None


@functools.cache
def layout_found(kind: type[MPLinearKernel], group: int, zero_points: bool, dtype: str) -> Layout | None:
    """Return the layout that reads back a small layer's random weights, and their scales and zero points."""
    layouts = {MarlinLinearKernel: (MARLIN,), HummingLinearKernel: HUMMING}.get(kind, ())
    if not layouts:
        return None
    inputs, outputs = max(256, group), 256
    layer = dict(inputs=inputs, outputs=outputs, dtype=dtype, group_size=group, zero_points=zero_points)
    linear = new_layer(layer, kind)
    kernel = kernel_of_layer(linear)
    assert isinstance(kernel, MPLinearKernel)
    packed, scale, zero, *_ = kernel._get_weight_params(linear)
    scales, int4 = scale.data.clone(), kernel.config.weight_type
    codes = unpack_quantized_values_into_int32(packed.data, int4, 1).view(outputs, scales.shape[1], -1)
    middle = torch.tensor(8) if zero is None else unpack_quantized_values_into_int32(zero.data, int4, 0)
    codes = (codes - middle.to(codes.device)[..., None]).flatten(1)
    try:
        ready(linear)
    except Exception:  # compiling a kernel fails in many ways; it is then not taken
        return None
    for layout in layouts:
        packed, kept, zero = layout.tensors(kernel, linear)
        ones = torch.ones_like(kept, dtype=torch.float32)
        out = torch.empty(outputs, inputs, dtype=INT8, device=kept.device)
        found = eight_bit_weights(packed, ones, zero, ones[0], out, layout.outputs_first)
        if torch.equal(found.int(), codes) and torch.equal(in_order_of_outputs(kept).t(), scales):
            return layout
    return None


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
    out = _scratch(packed.device, inputs * outputs, INT8).view(outputs, inputs)
    values = eight_bit_weights(packed, ones, zero, ones[0], out, outputs_first)  # value - zero, exactly
    most = values.view(outputs, groups, -1).abs().amax(2).float()
    greatest = (most * in_order_of_outputs(scale).float().abs().t()).amax(1)
    return torch.where(greatest > 0, greatest / GREATEST[precision], 1.0)


class GPUProduct:
    """Multiplies in 8 bit by the weights of a layer that ``kernel`` keeps in INT4."""

    def __init__(self, kernel: MPLinearKernel, layout: Layout) -> None:
        self._kernel = kernel
        self._layout = layout
        self._precision = FP8 if current_platform.has_device_capability(BLACKWELL) else INT8
        self.precision = "FP8" if self._precision == FP8 else "INT8"

    def prepare(self, layer: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the buffers that the layer's view needs, once its weights are packed."""
        packed, scale, zero = self._layout.tensors(self._kernel, layer)
        outputs_first = self._layout.outputs_first
        channel_scale = channel_scales(packed, scale, zero, self._precision, outputs_first)
        buffers = {CHANNEL_SCALE: channel_scale, INVERSE: channel_scale.reciprocal()}
        if zero is not None:
            buffers[ZERO] = zero
        if (bias := getattr(layer, "bias", None)) is not None:
            buffers[BIAS] = _permuted_back(bias, get_scale_perms()[1])
        return buffers

    def multiply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return [tokens, outputs] for ``x`` [tokens, inputs], in its dtype; ``bias`` is the layer's."""
        weight, scale, _ = self._layout.names or (self._kernel.w_q_name, self._kernel.w_s_name, "")
        buffers = layer._buffers
        out: torch.Tensor = torch.ops.flexquant.one_copy_gpu_linear(
            x,
            getattr(layer, weight),
            getattr(layer, scale),
            buffers.get(ZERO),
            buffers[INVERSE],
            buffers[CHANNEL_SCALE],
            None if bias is None else buffers[BIAS],
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
    inverse: torch.Tensor,
    channel_scale: torch.Tensor,
    bias: torch.Tensor | None,
    precision: torch.dtype,
    outputs_first: bool,
) -> torch.Tensor:
    """Return [tokens, outputs] for ``x`` [tokens, inputs], quantised per token and multiplied in 8 bit."""
    outputs, inputs = scale.shape[1], x.shape[1]
    out = _scratch(x.device, inputs * outputs, precision).view(outputs, inputs)
    weights = eight_bit_weights(packed, scale, zero, inverse, out, outputs_first)
    if precision == FP8:
        quantized, row = ops.scaled_fp8_quant(x.contiguous(), use_per_token_if_dynamic=True)
    else:
        quantized, row, _ = ops.scaled_int8_quant(x.contiguous(), None, None, symmetric=True)
    return ops.cutlass_scaled_mm(quantized, weights.t(), row, channel_scale[:, None], x.dtype, bias)


@torch.library.register_fake("flexquant::one_copy_gpu_linear", lib=_library)
def _output_shape(x: torch.Tensor, packed: object, scale: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty((x.shape[0], scale.shape[1]))


def _scratch(device: torch.device, weights: int, precision: torch.dtype) -> torch.Tensor:
    """Return memory for a layer's weights; it grows while layers are prepared, and never in a pass."""
    if device not in _memory or _memory[device].numel() < weights:
        _memory[device] = torch.empty(weights, dtype=INT8, device=device)
    return _memory[device][:weights].view(precision)
