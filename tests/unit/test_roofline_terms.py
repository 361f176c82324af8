# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Every term of a predicted pass, worked out by hand for a dense model, a mixture of experts and a hybrid."""

from __future__ import annotations

from math import ceil

import pytest

from flexquant.planning.planned_model import Linear, ModelShape
from flexquant.planning.roofline import Batch, linear_seconds, pass_seconds
from flexquant.policy.rules import load_policy
from tests.prediction import (
    ATTENTION,
    BF16,
    FP8,
    MARLIN,
    UNLIKE,
    W8A8_BYTES,
    W8A8_OPERATIONS,
    Call,
    Parts,
    decode,
    dense_layer,
    in_16_bit,
    in_int4,
    model,
    prefill,
    square,
    times,
    total,
)


def check(
    shape: ModelShape, variant: str, batch: Batch, parts: Parts, layers: int = 3, calls: int = 4
) -> None:
    """Compare a pass with a sum of parts, and the overhead of calls, layers and the pass."""
    overhead_us = (layers * calls + 1) * 3 + layers * 13 + 170
    found = pass_seconds(shape, variant, batch, UNLIKE)
    assert found == pytest.approx(sum(parts) + overhead_us * 1e-6, rel=1e-12, abs=0)


def test_a_dense_model_in_int4() -> None:
    shape = model("dense").shape(("w4a16",), 1, {})
    # 5 sequences: their tokens, 5 logits of 1001; 3 layers read 2 KV heads of 48, keys and values, 2 bytes.
    read = 5 * 77 * 3 * 2 * 2 * 48 * 2 / BF16[1]
    parts = total(times(3, dense_layer(in_int4(5))), in_16_bit(5)(1001, 320), (read, 0))
    check(shape, "w4a16", decode(5, 77), parts)
    # A prompt of 5: one row of logits, no cache, 5 x 6 / 2 pairs of 8 heads of 48, twice two operations.
    pairs = 15 * 3 * 8 * 48 * 4 / ATTENTION
    parts = total(times(3, dense_layer(in_int4(5))), in_16_bit(1)(1001, 320), (0, pairs))
    check(shape, "w4a16", prefill(5), parts)


@pytest.mark.parametrize(("devices", "kv_heads", "heads", "logits"), [(2, 1, 4, 501), (4, 1, 2, 251)])
def test_a_dense_model_on_several_devices(devices: int, kv_heads: int, heads: int, logits: int) -> None:
    shape = model("dense").shape(("w4a16",), devices, {})
    read = 5 * 77 * 3 * 2 * kv_heads * 48 * 2 / BF16[1]
    layers = times(3, dense_layer(in_int4(5), devices))
    head = total(
        in_16_bit(5)(1001, 320), times(-1, in_16_bit(5)(1001 - logits, 320)), (5 * 2 * 320 / BF16[1], 0)
    )
    check(shape, "w4a16", decode(5, 77), total(layers, head, (read, 0)))
    pairs = 15 * 3 * heads * 48 * 4 / ATTENTION
    found = pass_seconds(shape, "w4a16", prefill(5), UNLIKE)
    of_linears = pass_seconds(shape, "w4a16", decode(5, 0), UNLIKE)
    one_row = 2 * 4 * logits * 320 / BF16[0] + 4 * (2 * 320 + 2 * logits) / BF16[1]
    assert found - of_linears == pytest.approx(pairs - one_row, rel=1e-9, abs=0)


def in_int8(tokens: int, tiles: dict[tuple[int, int], int], tile: int, scales: float = 2) -> Call:
    """Return calls of W8A8 with given tiles, waves filled up, elements of a tile, and bytes of a scale."""

    def call(outputs: int, inputs: int) -> Parts:
        moved = outputs * inputs + scales * outputs + tokens * (inputs + 2 * outputs)
        quantised = 3 * tokens * inputs / BF16[1]
        operations = 2 * tiles[outputs, inputs] * tile * inputs
        return moved / W8A8_BYTES + quantised, operations / W8A8_OPERATIONS

    return call


FEW = {(576, 320): 14, (320, 384): 7, (1280, 320): 21, (320, 640): 7}
"""Tiles of 64 columns for up to 32 tokens in waves of 7: 9, 5, 20 and 5 are 2, 1, 3 and 1 waves."""
MANY = {(576, 320): 28, (320, 384): 21, (1280, 320): 56, (320, 640): 21}
"""Tiles of 64 x 96 for 200 tokens: 4 x 6, 4 x 4, 4 x 14 and 4 x 4 are 4, 3, 8 and 3 waves."""


@pytest.mark.parametrize(("tokens", "tiles", "tile"), [(17, FEW, 16 * 64), (200, MANY, 64 * 96)])
def test_a_dense_model_in_int8(tokens: int, tiles: dict[tuple[int, int], int], tile: int) -> None:
    """17 tokens are two rows of tiles of 16, which 7 processors take in other waves than one row."""
    if tokens == 17:
        tiles = {(576, 320): 21, (320, 384): 14, (1280, 320): 42, (320, 640): 14}
    shape = model("dense").shape(("w8a8",), 1, {})
    pairs = tokens * (tokens + 1) / 2 * 3 * 8 * 48 * 4 / ATTENTION
    layers = times(3, dense_layer(in_int8(tokens, tiles, tile)))
    check(shape, "w8a8", prefill(tokens), total(layers, in_16_bit(1)(1001, 320), (0, pairs)))


def test_a_dense_model_in_fp8() -> None:
    shape = model("dense").shape(("fp8", "w4a16"), 1, {})

    def fp8(outputs: int, inputs: int) -> Parts:
        moved = outputs * inputs + 2 * outputs + 5 * (inputs + 2 * outputs)
        return moved / FP8[1] + 3 * 5 * inputs / BF16[1], 2 * 5 * outputs * inputs / FP8[0]

    parts = total(times(3, dense_layer(fp8)), in_16_bit(5)(1001, 320))
    check(shape, "fp8", decode(5, 0), parts)


def test_one_copy_of_a_dense_model() -> None:
    """Each linear reads its INT4 weight and writes an INT8 one without scales, in a call of its own."""
    shape = model("dense").shape(("w4a16",), 1, load_policy("one-copy").derived)

    def computed(outputs: int, inputs: int) -> Parts:
        weights = outputs * inputs
        memory, compute = in_int8(5, FEW, 16 * 64, scales=0)(outputs, inputs)
        return memory + (weights / 2 + weights / 32 + weights) / BF16[1], compute

    parts = total(times(3, dense_layer(computed)), in_16_bit(5)(1001, 320))
    check(shape, "w8a8-from-int4", decode(5, 0), parts, calls=8)
    parts = total(times(3, dense_layer(in_int4(5, MARLIN))), in_16_bit(5)(1001, 320))
    check(shape, "w4a16", decode(5, 0), parts)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_mixture_of_experts(devices: int) -> None:
    """Three tokens of 2 experts each use 6 (1 - (4 / 6)^3) = 38 / 9, which Marlin runs.

    Each rank has the router. Of a linear whose inputs are shared, a rank counts half of the scales' bytes.
    """
    shape = model("mixture").shape(("w4a16", "w8a8"), devices, {})
    used, inner = 38 / 9, 192 // devices

    def experts(outputs: int, inputs: int) -> Parts:
        moved = used * (outputs * inputs / 2 + outputs * inputs / 32) + 6 * (2 * inputs + 2 * outputs)
        return moved / MARLIN[1], 2 * 6 * outputs * inputs / MARLIN[0]

    attention = total(in_int4(3)(640 // devices, 256), in_int4(3)(256, 320 // devices))
    layer = total(attention, in_16_bit(3)(6, 256), experts(2 * inner, 256), experts(256, inner))
    read = 3 * 50 * 2 * 2 * (2 // devices) * 80 * 2 / BF16[1]
    parts = total(times(2, layer), in_16_bit(3)(1000 // devices, 256), (read, 0))
    check(shape, "w4a16", decode(3, 50), parts, layers=2, calls=5)

    def experts_in_int8(outputs: int, inputs: int, scales: float = 2) -> Parts:
        """Two rows an expert at most are one row of tiles: 38 / 9 experts, and columns of 64."""
        moved = used * (outputs * inputs + scales * outputs) + 6 * (inputs + 2 * outputs)
        tiles = ceil(ceil(used * ceil(outputs / 64)) / 7) * 7 * 16 * 64
        return moved / W8A8_BYTES + 3 * 3 * inputs / BF16[1], 2 * tiles * inputs / W8A8_OPERATIONS

    # 10 or 5 tiles of 64 columns, and 4, in waves of 7.
    tiles = {(640, 256): 14, (256, 320): 7, (320, 256): 7, (256, 160): 7}
    qkv = in_int8(3, tiles, 16 * 64)(640 // devices, 256)
    out = in_int8(3, tiles, 16 * 64, 2 / devices)(256, 320 // devices)
    mlp = total(experts_in_int8(2 * inner, 256), experts_in_int8(256, inner, 2 / devices))
    layer = total(qkv, out, in_16_bit(3)(6, 256), mlp)
    parts = total(times(2, layer), in_16_bit(3)(1000 // devices, 256))
    check(shape, "w8a8", decode(3, 0), parts, layers=2, calls=5)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_hybrid(devices: int) -> None:
    """One of three layers attends; the others have two linears around a convolution. The head is tied."""
    shape = model("hybrid").shape(("w4a16",), devices, {})
    call = in_int4(5)
    mlp = total(times(2, call(448 // devices, 256)), call(256, 448 // devices))
    around = total(call(768 // devices, 256), call(256, 256 // devices))
    attention = total(call((4 + 2 * 2) * 64 // devices, 256), call(256, 256 // devices))
    read = 5 * 77 * 1 * 2 * (2 // devices) * 64 * 2 / BF16[1]
    head = in_16_bit(5)(1000 // devices, 256)
    parts = total(times(3, mlp), times(2, around), attention, head, (read, 0))
    check(shape, "w4a16", decode(5, 77), parts, calls=5)
    pairs = 15 * 1 * (4 // devices) * 64 * 4 / ATTENTION
    head = in_16_bit(1)(1000 // devices, 256)
    parts = total(times(3, mlp), times(2, around), attention, head, (0, pairs))
    check(shape, "w4a16", prefill(5), parts, calls=5)


def test_a_call_alone_has_an_overhead_of_its_own() -> None:
    alone, in_pass = (linear_seconds(square("w8a8"), 3, UNLIKE, in_pass=which) for which in (False, True))
    assert alone - in_pass == pytest.approx((11 - 3) * 1e-6)


def test_experts_in_use_may_be_a_fraction_and_their_tiles_are_whole() -> None:
    """97 tokens use all 6 experts for 32.3 rows each, or 33; 3 use 38 / 9 of them, and 22 tiles."""
    experts = Linear(320, 256, 0, "w8a8", experts=6, active_experts=2)
    for tokens, tile in ((97, 64 * 96), (3, 16 * 64)):
        moved = 2 * tokens * (256 + 2 * 320)
        expected = 11e-6 + moved / W8A8_BYTES + 2 * 28 * tile * 256 / W8A8_OPERATIONS
        assert linear_seconds(experts, tokens, UNLIKE) == pytest.approx(expected, rel=1e-12)
