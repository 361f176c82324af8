# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Every term of a predicted pass, worked out by hand for a dense model, a mixture of experts and a hybrid.

No two sizes, rates or overheads are alike, so that none can stand for another.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from math import ceil, log
from pathlib import Path
from typing import Any

import pytest

from flexquant.errors import FlexQuantError
from flexquant.planning.advising import Batches, find_way, try_ways
from flexquant.planning.device import Device, load_device
from flexquant.planning.model_shape import ModelShape
from flexquant.planning.planned_model import PlannedModel
from flexquant.planning.predicting import kv_cache_tokens, roofline_pass_times
from flexquant.planning.roofline import linear_cost, pass_cost
from flexquant.policy.rules import load_policy
from tests.prediction import square

DEVICE = """schema: flexquant.device/v1
description: no two numbers alike
memory_gib: 2
memory_gb_per_s: 100
tflops: {bf16: 10, int8: 24, fp8: 26}
processors: 7
call_us: 11
call_in_pass_us: 3
layer_us: 13
pass_us: 170
attention_tflops: 4.5
reserve_gib: 0.3
kernels:
  bf16: {efficiency: 0.5, bandwidth: 0.55}
  w8a8: {efficiency: 0.25, bandwidth: 0.7, tiles: {32: 16x64, 128: 64x96}}
  fp8: {tflops: 8, gb_per_s: 75}
  w4a16: {tflops: 4, gb_per_s: 80}
  w4a16-marlin: {tflops: 3, gb_per_s: 90}
  w4a8: {tflops: 7, gb_per_s: 60, call_us: 19}
"""
BF16, FP8, W4A16, MARLIN, W4A8 = (5e12, 55e9), (8e12, 75e9), (4e12, 80e9), (3e12, 90e9), (7e12, 60e9)
"""Operations and bytes a second."""
W8A8_BYTES, W8A8_OPERATIONS, ATTENTION = 70e9, 6e12, 4.5e12

# Inputs are multiples of 64, not all of 128: INT4 has groups of 64.
DENSE = {
    "model_type": "qwen3",
    "hidden_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "intermediate_size": 640,
    "vocab_size": 1001,
    "tie_word_embeddings": False,
}
MIXTURE = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 80,
    "intermediate_size": 512,
    "moe_intermediate_size": 192,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}
HYBRID = {
    "model_type": "lfm2",
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 448,
    "block_auto_adjust_ff_dim": False,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Device:
    file = tmp_path_factory.mktemp("device") / "unlike.yaml"
    file.write_text(DEVICE)
    return load_device(str(file))


def planned(folder: Path, config: dict[str, Any]) -> PlannedModel:
    (folder / "config.json").write_text(json.dumps(config))
    return PlannedModel.read(str(folder))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> PlannedModel:
    return planned(tmp_path_factory.mktemp("dense"), DENSE)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> PlannedModel:
    return planned(tmp_path_factory.mktemp("mixture"), MIXTURE)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> PlannedModel:
    return planned(tmp_path_factory.mktemp("hybrid"), HYBRID)


# Parts of the time of one call by its outputs and inputs, each a (memory, compute) in seconds.
Parts = tuple[float, float]
Call = Callable[[int, int], Parts]


def total(*parts: Parts) -> Parts:
    return sum(part[0] for part in parts), sum(part[1] for part in parts)


def times(count: int, parts: Parts) -> Parts:
    return count * parts[0], count * parts[1]


def in_16_bit(tokens: int) -> Call:
    def call(outputs: int, inputs: int) -> Parts:
        moved = 2 * outputs * inputs + tokens * (2 * inputs + 2 * outputs)
        return moved / BF16[1], 2 * tokens * outputs * inputs / BF16[0]

    return call


def in_int4(tokens: int, rates: Parts = W4A16) -> Call:
    """Return calls with half a byte a weight, and two for the scale of 64."""

    def call(outputs: int, inputs: int) -> Parts:
        stored = outputs * inputs / 2 + 2 * outputs * inputs / 64
        moved = stored + tokens * (2 * inputs + 2 * outputs)
        return moved / rates[1], 2 * tokens * outputs * inputs / rates[0]

    return call


def check(model: ModelShape, variant: str, phase: str, size: int, context: int, device: Device) -> Any:
    """Return a function that compares a pass with a sum of parts and the microseconds of overhead."""

    def equals(parts: Parts, overhead_us: float) -> None:
        found = pass_cost(model, variant, phase, size, context, device)
        assert (found.memory, found.compute) == pytest.approx(parts, rel=1e-12, abs=0)
        assert found.overhead == pytest.approx(overhead_us * 1e-6, rel=1e-12, abs=0)
        assert found.seconds == pytest.approx(sum(parts) + overhead_us * 1e-6, rel=1e-12, abs=0)

    return equals


def dense_layer(call: Call, devices: int = 1) -> Parts:
    """Return a layer of DENSE; 1, 2 or 4 devices hold 8 + 2 x 2, 4 + 2 x 1 or 2 + 2 x 1 heads of 48."""
    heads = {1: 12, 2: 6, 4: 4}[devices]
    return total(
        call(heads * 48, 320),
        call(320, 384 // devices),
        call(1280 // devices, 320),
        call(320, 640 // devices),
    )


def test_a_dense_model_in_int4(dense: PlannedModel, device: Device) -> None:
    model = dense.shape(("w4a16",), 1, {})
    # 5 sequences: their tokens, 5 logits of 1001; 3 layers read 2 KV heads of 48, keys and values, 2 bytes.
    read = 5 * 77 * 3 * 2 * 2 * 48 * 2 / BF16[1]
    parts = total(times(3, dense_layer(in_int4(5))), in_16_bit(5)(1001, 320), (read, 0))
    check(model, "w4a16", "decode", 5, 77, device)(parts, (3 * 4 + 1) * 3 + 3 * 13 + 170)
    # A prompt of 5: one row of logits, no cache, 5 x 6 / 2 pairs of 8 heads of 48, twice two operations.
    pairs = 15 * 3 * 8 * 48 * 4 / ATTENTION
    parts = total(times(3, dense_layer(in_int4(5))), in_16_bit(1)(1001, 320), (0, pairs))
    check(model, "w4a16", "prefill", 5, 77, device)(parts, (3 * 4 + 1) * 3 + 3 * 13 + 170)


@pytest.mark.parametrize(("devices", "kv_heads", "heads", "logits"), [(2, 1, 4, 501), (4, 1, 2, 251)])
def test_a_dense_model_on_several_devices(
    dense: PlannedModel, device: Device, devices: int, kv_heads: int, heads: int, logits: int
) -> None:
    model = dense.shape(("w4a16",), devices, {})
    read = 5 * 77 * 3 * 2 * kv_heads * 48 * 2 / BF16[1]
    layers = times(3, dense_layer(in_int4(5), devices))
    head = total(
        in_16_bit(5)(1001, 320), times(-1, in_16_bit(5)(1001 - logits, 320)), (5 * 2 * 320 / BF16[1], 0)
    )
    check(model, "w4a16", "decode", 5, 77, device)(
        total(layers, head, (read, 0)), (3 * 4 + 1) * 3 + 3 * 13 + 170
    )
    pairs = 15 * 3 * heads * 48 * 4 / ATTENTION
    found = pass_cost(model, "w4a16", "prefill", 5, 0, device)
    of_linears = pass_cost(model, "w4a16", "decode", 5, 0, device)
    one_row = 2 * 4 * logits * 320 / BF16[0]
    assert found.compute - of_linears.compute == pytest.approx(pairs - one_row, rel=1e-9, abs=0)


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
def test_a_dense_model_in_int8(
    dense: PlannedModel, device: Device, tokens: int, tiles: dict[tuple[int, int], int], tile: int
) -> None:
    """17 tokens are two rows of tiles of 16, which 7 processors take in other waves than one row."""
    if tokens == 17:
        tiles = {(576, 320): 21, (320, 384): 14, (1280, 320): 42, (320, 640): 14}
    model = dense.shape(("w8a8",), 1, {})
    pairs = tokens * (tokens + 1) / 2 * 3 * 8 * 48 * 4 / ATTENTION
    layers = times(3, dense_layer(in_int8(tokens, tiles, tile)))
    check(model, "w8a8", "prefill", tokens, 0, device)(
        total(layers, in_16_bit(1)(1001, 320), (0, pairs)), (3 * 4 + 1) * 3 + 3 * 13 + 170
    )


def test_a_dense_model_in_fp8_and_w4a8(dense: PlannedModel, device: Device) -> None:
    model = dense.shape(("fp8", "w4a16"), 1, load_policy("w4a8").derived)

    def fp8(outputs: int, inputs: int) -> Parts:
        moved = outputs * inputs + 2 * outputs + 5 * (inputs + 2 * outputs)
        return moved / FP8[1] + 3 * 5 * inputs / BF16[1], 2 * 5 * outputs * inputs / FP8[0]

    def w4a8(outputs: int, inputs: int) -> Parts:
        moved = outputs * inputs / 2 + outputs * inputs / 32 + 5 * (inputs + 2 * outputs)
        return moved / W4A8[1] + 3 * 5 * inputs / BF16[1], 2 * 5 * outputs * inputs / W4A8[0]

    for variant, call in (("fp8", fp8), ("w4a8", w4a8)):
        parts = total(times(3, dense_layer(call)), in_16_bit(5)(1001, 320))
        check(model, variant, "decode", 5, 0, device)(parts, (3 * 4 + 1) * 3 + 3 * 13 + 170)


def test_one_copy_of_a_dense_model(dense: PlannedModel, device: Device) -> None:
    """Each linear reads its INT4 weight and writes an INT8 one without scales, in a call of its own."""
    model = dense.shape(("w4a16",), 1, load_policy("one-copy").derived)

    def computed(outputs: int, inputs: int) -> Parts:
        weights = outputs * inputs
        memory, compute = in_int8(5, FEW, 16 * 64, scales=0)(outputs, inputs)
        return memory + (weights / 2 + weights / 32 + weights) / BF16[1], compute

    parts = total(times(3, dense_layer(computed)), in_16_bit(5)(1001, 320))
    check(model, "w8a8-from-int4", "decode", 5, 0, device)(parts, (3 * 8 + 1) * 3 + 3 * 13 + 170)
    parts = total(times(3, dense_layer(in_int4(5, MARLIN))), in_16_bit(5)(1001, 320))
    check(model, "w4a16", "decode", 5, 0, device)(parts, (3 * 4 + 1) * 3 + 3 * 13 + 170)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_mixture_of_experts(mixture: PlannedModel, device: Device, devices: int) -> None:
    """Of 6 experts 3 tokens with 2 each use 6 (1 - (4 / 6)^3) = 38 / 9, in Marlin; each rank has the router.

    Where the inputs are shared, half of the scales' bytes are counted on each of two ranks.
    """
    model = mixture.shape(("w4a16", "w8a8"), devices, {})
    used, inner = 38 / 9, 192 // devices

    def experts(outputs: int, inputs: int) -> Parts:
        moved = used * (outputs * inputs / 2 + outputs * inputs / 32) + 6 * (2 * inputs + 2 * outputs)
        return moved / MARLIN[1], 2 * 6 * outputs * inputs / MARLIN[0]

    attention = total(in_int4(3)(640 // devices, 256), in_int4(3)(256, 320 // devices))
    layer = total(attention, in_16_bit(3)(6, 256), experts(2 * inner, 256), experts(256, inner))
    read = 3 * 50 * 2 * 2 * (2 // devices) * 80 * 2 / BF16[1]
    parts = total(times(2, layer), in_16_bit(3)(1000 // devices, 256), (read, 0))
    check(model, "w4a16", "decode", 3, 50, device)(parts, (2 * 5 + 1) * 3 + 2 * 13 + 170)

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
    check(model, "w8a8", "decode", 3, 0, device)(parts, (2 * 5 + 1) * 3 + 2 * 13 + 170)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_hybrid(hybrid: PlannedModel, device: Device, devices: int) -> None:
    """One of three layers attends; the others have two linears around a convolution. The head is tied."""
    model = hybrid.shape(("w4a16",), devices, {})
    call = in_int4(5)
    mlp = total(times(2, call(448 // devices, 256)), call(256, 448 // devices))
    around = total(call(768 // devices, 256), call(256, 256 // devices))
    attention = total(call((4 + 2 * 2) * 64 // devices, 256), call(256, 256 // devices))
    read = 5 * 77 * 1 * 2 * (2 // devices) * 64 * 2 / BF16[1]
    head = in_16_bit(5)(1000 // devices, 256)
    parts = total(times(3, mlp), times(2, around), attention, head, (read, 0))
    check(model, "w4a16", "decode", 5, 77, device)(parts, (3 * 5 + 1) * 3 + 3 * 13 + 170)
    pairs = 15 * 1 * (4 // devices) * 64 * 4 / ATTENTION
    head = in_16_bit(1)(1000 // devices, 256)
    parts = total(times(3, mlp), times(2, around), attention, head, (0, pairs))
    check(model, "w4a16", "prefill", 5, 77, device)(parts, (3 * 5 + 1) * 3 + 3 * 13 + 170)


def test_a_call_alone_has_an_overhead_of_its_own(device: Device) -> None:
    assert linear_cost(square("w8a8"), 3, device).overhead == pytest.approx(11e-6)
    assert linear_cost(square("w8a8"), 3, device, in_pass=True).overhead == pytest.approx(3e-6)


def test_bytes_of_the_weights(dense: PlannedModel, mixture: PlannedModel, hybrid: PlannedModel) -> None:
    """Beside the linears lie norms, the embedding, the head, routers and convolutions, 2 bytes a number."""
    linears = 576 * 320 + 320 * 384 + 1280 * 320 + 320 * 640
    outputs = 576 + 320 + 1280 + 320
    rest = 2 * (2 * 1001 * 320 + 3 * (320 + 320 + 48 + 48) + 320)
    both = dense.shape(("w8a8", "w4a16"), 1, {})
    assert both.own_bytes["w8a8"] == 3 * (linears + 2 * outputs)
    assert both.own_bytes["w4a16"] == 3 * (linears / 2 + linears / 32)
    assert both.shared_bytes == rest
    assert both.resident_bytes == 3 * (linears * 1.53125 + 2 * outputs) + rest
    assert both.bytes_of(["w4a16"]) == 3 * linears * 0.53125 + rest
    one = dense.shape(("w4a16",), 2, load_policy("one-copy").derived)
    assert one.resident_bytes == (3 * linears * 0.53125 + rest) / 2 + 640 * 320

    experts = 6 * (384 * 256 + 256 * 192)
    attention = 640 * 256 + 256 * 320
    in_int4 = mixture.shape(("w4a16",), 1, {})
    assert in_int4.own_bytes["w4a16"] == 2 * ((experts + attention) * 0.53125 + 2 * 6 * 256)
    assert in_int4.shared_bytes == 2 * (2 * 1000 * 256 + 2 * (256 + 256 + 80 + 80) + 256)

    in_int4 = hybrid.shape(("w4a16",), 1, {})
    mlps, convolved = 3 * 3 * 448 * 256, 2 * (768 * 256 + 256 * 256)
    assert in_int4.own_bytes["w4a16"] == (mlps + convolved + 512 * 256 + 256 * 256) * 0.53125
    assert in_int4.shared_bytes == 2 * (1000 * 256 + 3 * 2 * 256 + 2 * 256 * 3 + 2 * 64 + 256)


def test_tokens_that_the_cache_holds(dense: PlannedModel, device: Device) -> None:
    """0.85 of 2 GiB, less 0.3 GiB and the weights, in whole tokens of 3 x 2 x 2 x 48 numbers."""
    model = dense.shape(("w8a8", "w4a16"), 1, {})
    weights, token = model.resident_bytes, 3 * 2 * 2 * 48 * 2
    left = 0.85 * 2 * 2**30 - 0.3 * 2**30 - weights
    assert left % token
    assert kv_cache_tokens(model, device, 100, 0.85) == int(left / token)
    alone = int((left + model.own_bytes["w8a8"]) / token)
    assert kv_cache_tokens(model, device, 100, 0.85, ["w4a16"]) == alone
    fitting = int(left / token)
    assert kv_cache_tokens(model, device, fitting, 0.85) == fitting
    with pytest.raises(FlexQuantError, match=r"0\.85 of its 2 GiB is 1\.7 GiB"):
        kv_cache_tokens(model, device, fitting + 1, 0.85)


def test_times_of_passes_are_those_of_the_terms(dense: PlannedModel, device: Device) -> None:
    model = dense.shape(("w8a8", "w4a16"), 1, {})
    found = roofline_pass_times(model, device, 77)
    assert found.context == 77
    assert found.context_seconds == pytest.approx(3 * 2 * 2 * 48 * 2 / BF16[1], rel=1e-12, abs=0)
    for variant in ("w8a8", "w4a16"):
        assert found.decode[variant][8].median == pass_cost(model, variant, "decode", 8, 77, device).seconds
        assert (
            found.prefill[variant][64].median == pass_cost(model, variant, "prefill", 64, 0, device).seconds
        )
    assert found.origin == {"device": device.name, "description": "no two numbers alike"}


def test_latencies_of_a_load(dense: PlannedModel, tmp_path: Path) -> None:
    """Three requests of 1 + 201 tokens on a CPU take 201 passes that decode, with 0, 1 ... 200 in the cache.

    A pass of three lies between those of two and four in the logarithms of time and size, where sequences
    have 1 + 100 tokens in the cache.
    """
    lines = [
        line for line in DEVICE.splitlines() if not line.startswith("processors") and "tiles" not in line
    ]
    (tmp_path / "cpu.yaml").write_text("\n".join([*lines, "  w8a8: {tflops: 6, gb_per_s: 70}"]))
    traffic = Batches(1, 201, (3,))
    way = find_way(try_ways(dense, load_device(str(tmp_path / "cpu.yaml")), traffic, 1, 0.85), "stock W4A16")
    token = 3 * 2 * 2 * 48 * 2 / BF16[1]

    def seconds(size: int) -> float:
        parts = total(times(3, dense_layer(in_int4(size))), in_16_bit(size)(1001, 320))
        return sum(parts) + size * 101 * token + ((3 * 4 + 1) * 3 + 3 * 13 + 170) * 1e-6

    three = seconds(2) * 1.5 ** (log(seconds(4) / seconds(2)) / log(2))
    each = [three + token * 3 * (cached - 101) for cached in range(201)]
    load = way.loads[3]
    assert load.ttft == pytest.approx(each[0], rel=1e-11, abs=0)
    assert load.tpot == pytest.approx(sum(each[1:]) / 200, rel=1e-11, abs=0)
    assert [load.request, way.seconds] == pytest.approx([sum(each)] * 2, rel=1e-11, abs=0)
    weights = dense.shape(("w4a16",), 1, {}).resident_bytes
    assert way.weights_gib == weights / 2**30
    assert way.kv_cache_tokens == int((0.85 * 2 * 2**30 - 0.3 * 2**30 - weights) / (token * BF16[1]))
