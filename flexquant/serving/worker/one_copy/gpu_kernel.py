# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Write a layer's 8-bit weights on a GPU, from INT4 weights that are packed in Marlin's tiles."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flexquant.serving.vllm_api import tl, triton

MOST_INPUTS = 128
"""Largest number of inputs of the weights that one program of the kernel writes; it has 64 outputs."""
INT8 = torch.int8
ROUNDS = tl.constexpr(12582912.0)
"""Added to a small float32, it rounds to the nearest integer, ties to even: the low byte of its bits."""
INTEGERS = tl.constexpr(8388608.0)
"""2 to the 23rd: from here to twice that, the low bits of a float32 are what it has above this number."""
INTEGER_BITS = 0x4B000000
"""The bits of that number. The kernel gets them as an argument: one instruction takes one constant."""


@triton.jit
def _int4_to_8_bit(  # type: ignore[no-untyped-def]  # Triton tells the types itself
    packed,
    scale,
    zero,
    row,
    column,
    difference,
    out,
    outputs,
    inputs,
    group,
    integer_bits,
    is_grouped: tl.constexpr,
    has_zero: tl.constexpr,
    is_nested: tl.constexpr,
    is_integer: tl.constexpr,
    outputs_first: tl.constexpr,
    tiles: tl.constexpr,
):
    part = tl.program_id(0)
    first = tl.program_id(1) * tiles
    # Axes as the words lie: tile, output % 8, pair of inputs, output // 16.
    tile = first + tl.arange(0, tiles)[:, None, None, None]
    low = tl.arange(0, 8)[None, :, None, None]
    pair = tl.arange(0, 4)[None, None, :, None]
    block = tl.arange(0, 4)[None, None, None, :]
    place = tile * (outputs * 2) + part * 128 + low * 16 + pair * 4 + block
    word = tl.load(packed + place, mask=tile * 16 < inputs, other=0)
    if is_nested:
        added = tl.load(difference + place, mask=tile * 16 < inputs, other=0)
        pairs = column + tile * 16 + pair * 2
        here = tile * 16 < inputs
        first_even, first_odd = tl.load(pairs, here, 0.0), tl.load(pairs + 1, here, 0.0)
        last_even, last_odd = tl.load(pairs + 8, here, 0.0), tl.load(pairs + 9, here, 0.0)
    else:
        added = word
        first_even, first_odd, last_even, last_odd = 1.0, 1.0, 1.0, 1.0
    of_group = first * 16 // group * outputs
    k = first * 16 + tl.arange(0, tiles * 16)[None, None, :]
    kind: tl.constexpr = out.dtype.element_ty
    for half in tl.static_range(2):
        n = part * 64 + block * 16 + half * 8 + low
        if is_grouped:
            place = n // 64 * 64 + n % 8 * 8 + n % 64 // 8
        else:
            place = n // 32 * 32 + n % 8 // 2 * 8 + n % 32 // 8 * 2 + n % 2
        ratio = tl.load(scale + of_group + place).to(tl.float32)
        ratio = ratio * tl.load(row + n)
        if has_zero:
            middle = tl.load(zero + of_group + n).to(tl.float32)
        else:
            middle = tl.full([1, 8, 1, 4], 8, tl.float32)
        lower, upper = (half * 2, half * 2 + 1) if outputs_first else (half, half + 2)
        even = tl.join(
            _weight(word, added, lower, middle, ratio, first_even, integer_bits, is_integer, is_nested, kind),
            _weight(word, added, upper, middle, ratio, last_even, integer_bits, is_integer, is_nested, kind),
        )
        # The places 4 to 7 would reach into the exponent.
        high, above = word >> 12, added >> 12
        odd = tl.join(
            _weight(
                high, above, lower + 1, middle, ratio, first_odd, integer_bits, is_integer, is_nested, kind
            ),
            _weight(
                high, above, upper + 1, middle, ratio, last_odd, integer_bits, is_integer, is_nested, kind
            ),
        )
        # From [tile, output % 8, pair, output // 16, upper half of 16 inputs, odd] to [outputs, inputs].
        weights = tl.permute(tl.join(even, odd), (1, 3, 0, 4, 2, 5))
        weights = tl.reshape(weights, (8, 4, tiles * 16))
        output = tl.arange(0, 8)[:, None, None] + tl.arange(0, 4)[None, :, None] * 16
        tl.store(out + (part * 64 + half * 8 + output) * inputs + k, weights, mask=k < inputs)


@triton.jit
def _weight(  # type: ignore[no-untyped-def]
    word,
    added,
    place: tl.constexpr,
    middle,
    ratio,
    column,
    integer_bits,
    is_integer: tl.constexpr,
    is_nested: tl.constexpr,
    kind: tl.constexpr,
):
    """Return the 8-bit weights of a word's place, 0 to 4, without a conversion between types.

    A weight in its place has the factor 16 to the place, and its ratio the inverse: both are exact.
    """
    value = ((word & (15 << (4 * place))) | integer_bits).to(tl.float32, bitcast=True)
    exact = (value - (middle * (1 << (4 * place)) + INTEGERS)) * (ratio * (1.0 / (1 << (4 * place))))
    if is_nested:
        near = (exact * column + (ROUNDS - 8)).to(tl.int32, bitcast=True)
        return (near + ((added >> (4 * place)) & 15)).to(tl.int8)
    if is_integer:
        return (exact + ROUNDS).to(tl.int32, bitcast=True).to(tl.int8)
    return exact.to(kind)


@triton.jit
def _put(places, values, out, number, inputs, padded: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write an output's ``number`` values to the places among its inputs, where these are not negative."""
    output = tl.program_id(0)
    n = tl.arange(0, padded)
    place = tl.load(places + output * number + n, mask=n < number, other=-1)
    value = tl.load(values + output * number + n, mask=n < number, other=0)
    tl.store(out + output * inputs + place, value, mask=place >= 0)


def compile_options(tiles: int) -> dict[str, int]:
    """Return Triton's options for the kernel: no fused multiply-add, which would round once."""
    return {"num_warps": max(1, tiles // 4), "enable_fp_fusion": False}


def eight_bit_weights(
    packed: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    row: Tensor,
    out: Tensor,
    outputs_first: bool,
    nested: Sequence[Tensor] = (),
) -> Tensor:
    """Write the weights into ``out`` [outputs, inputs], in INT8 or FP8, and return it.

    ``packed`` int32 [inputs / 16, outputs * 2] and ``scale`` [groups, outputs] are as the kernel keeps them,
    ``zero`` [groups, outputs] and ``row`` float32 [outputs] are in the order of outputs. In INT8 a weight is
    (value - zero) * (scale * row), each operation rounded to the nearest float32, and then to the nearest
    integer, ties to even: a fused multiply-add, which rounds once, would differ.

    Nested weights have a column, float32 [inputs], a difference, packed as ``packed``, exceptions' inputs,
    int32 [outputs, exceptions] with -1 for none, and their weights, int8: (value - zero) * (scale * row) *
    column is rounded, and the difference is added; an exception takes the place of such a weight.
    """
    outputs, inputs = out.shape
    column, difference, *exceptions = nested or (row, packed)
    group = inputs // len(scale)
    tiles = min(group, MOST_INPUTS) // 16
    tensors = packed, scale, scale if zero is None else zero, row, column, difference, out
    constants = {
        "is_grouped": len(scale) > 1,
        "has_zero": zero is not None,
        "is_nested": bool(nested),
        "is_integer": out.dtype == INT8,
        "outputs_first": outputs_first,
        "tiles": tiles,
    }
    grid = outputs // 64, triton.cdiv(inputs, tiles * 16)
    options = constants | compile_options(tiles)
    _int4_to_8_bit[grid](*tensors, outputs, inputs, group, INTEGER_BITS, **options)
    if exceptions:
        number = exceptions[0].shape[1]
        _put[(outputs,)](*exceptions, out, number, inputs, padded=triton.next_power_of_2(number))
    return out
