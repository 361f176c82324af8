# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Every term of a predicted pass, and bytes, caches and loads, by hand for models of three kinds."""

from dataclasses import replace
from math import ceil, hypot

import pytest

from flexquant.documents.yaml_document import builtin_names
from flexquant.planning import roofline
from flexquant.planning.advising import find_way, kv_cache_tokens, try_ways
from flexquant.planning.device import HUMMING, PACKAGE, load_device
from flexquant.planning.device import MARLIN as MARLIN_KERNEL
from flexquant.planning.planned_model import Linear, ModelShape
from flexquant.planning.roofline import Batch, Batches, Limits, Load, linear_seconds, pass_seconds, serve
from flexquant.policy.rules import load_policy
from flexquant.policy.schema import Phase
from tests import prediction as hand
from tests.prediction import BF16, MARLIN, UNLIKE, decode, in_16_bit, in_int4, model, prefill, times, total


def check(shape: ModelShape, variant: str, batch: Batch, parts: hand.Parts, layers=3, calls=4) -> None:
    """Compare a pass with a sum of parts, and the overhead of calls, layers and the pass."""
    overhead_us = (layers * calls + 1) * 3 + layers * 13 + 170
    found = pass_seconds(shape, variant, batch, UNLIKE)
    assert found == pytest.approx(sum(parts) + overhead_us * 1e-6, rel=1e-12, abs=0)


def test_a_dense_model_in_int4():
    shape = model("dense").shape(("w4a16",), 1, {})
    # 5 sequences: their tokens, 5 logits of 1001; 3 layers read 2 KV heads of 48, keys and values, 2 bytes.
    read = 5 * 77 * 3 * 2 * 2 * 48 * 2 / BF16[1]
    parts = total(times(3, hand.dense_layer(in_int4(5))), in_16_bit(5)(1001, 320), (read, 0))
    check(shape, "w4a16", decode(5, 77), parts)
    # A prompt of 5: one row of logits, no cache, 5 x 6 / 2 pairs of 8 heads of 48, twice two operations.
    pairs = 15 * 3 * 8 * 48 * 4 / hand.ATTENTION
    parts = total(times(3, hand.dense_layer(in_int4(5))), in_16_bit(1)(1001, 320), (0, pairs))
    check(shape, "w4a16", prefill(5), parts)


def in_int8(tokens: int, tiles: dict[tuple[int, int], int], tile: int, scales: float = 2) -> hand.Call:
    """Return calls of W8A8 with given tiles, waves filled up, elements of a tile, and bytes of a scale."""

    def call(outputs: int, inputs: int) -> hand.Parts:
        moved = outputs * inputs + scales * outputs + tokens * (inputs + 2 * outputs)
        quantised = 3 * tokens * inputs / BF16[1]
        operations = 2 * tiles[outputs, inputs] * tile * inputs
        return moved / hand.W8A8_BYTES + quantised, operations / hand.W8A8_OPERATIONS

    return call


FEW = {(576, 320): 14, (320, 384): 7, (1280, 320): 21, (320, 640): 7}
"""Tiles of 64 columns for up to 32 tokens in waves of 7: 9, 5, 20 and 5 are 2, 1, 3 and 1 waves."""
MANY = {(576, 320): 28, (320, 384): 21, (1280, 320): 56, (320, 640): 21}
"""Tiles of 64 x 96 for 200 tokens: 4 x 6, 4 x 4, 4 x 14 and 4 x 4 are 4, 3, 8 and 3 waves."""


@pytest.mark.parametrize(("tokens", "tiles", "tile"), [(17, FEW, 16 * 64), (200, MANY, 64 * 96)])
def test_a_dense_model_in_int8(tokens, tiles, tile):
    """17 tokens are two rows of tiles of 16, which 7 processors take in other waves than one row."""
    if tokens == 17:
        tiles = {(576, 320): 21, (320, 384): 14, (1280, 320): 42, (320, 640): 14}
    shape = model("dense").shape(("w8a8",), 1, {})
    pairs = tokens * (tokens + 1) / 2 * 3 * 8 * 48 * 4 / hand.ATTENTION
    layers = times(3, hand.dense_layer(in_int8(tokens, tiles, tile)))
    check(shape, "w8a8", prefill(tokens), total(layers, in_16_bit(1)(1001, 320), (0, pairs)))


def test_a_dense_model_in_fp8():
    shape = model("dense").shape(("fp8", "w4a16"), 1, {})

    def fp8(outputs: int, inputs: int) -> hand.Parts:
        moved = outputs * inputs + 2 * outputs + 5 * (inputs + 2 * outputs)
        return moved / hand.FP8[1] + 3 * 5 * inputs / BF16[1], 2 * 5 * outputs * inputs / hand.FP8[0]

    check(shape, "fp8", decode(5, 0), total(times(3, hand.dense_layer(fp8)), in_16_bit(5)(1001, 320)))


def test_one_copy_of_a_dense_model():
    """Each linear reads its INT4 weight and writes an INT8 one without scales, in a call of its own."""
    shape = model("dense").shape(("w4a16",), 1, load_policy("one-copy").derived)

    def computed(outputs: int, inputs: int) -> hand.Parts:
        weights = outputs * inputs
        memory, compute = in_int8(5, FEW, 16 * 64, scales=0)(outputs, inputs)
        return memory + (weights / 2 + weights / 32 + weights) / BF16[1], compute

    parts = total(times(3, hand.dense_layer(computed)), in_16_bit(5)(1001, 320))
    check(shape, "w8a8-from-int4", decode(5, 0), parts, calls=8)
    parts = total(times(3, hand.dense_layer(in_int4(5, MARLIN))), in_16_bit(5)(1001, 320))
    check(shape, "w4a16", decode(5, 0), parts)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_mixture_of_experts(devices):
    """Three tokens of 2 experts each use 6 (1 - (4 / 6)^3) = 38 / 9, which Marlin runs.

    Each rank has the router. Of a linear whose inputs are shared, a rank counts half of the scales' bytes.
    """
    shape = model("mixture").shape(("w4a16", "w8a8"), devices, {})
    used, inner = 38 / 9, 192 // devices

    def experts(outputs: int, inputs: int) -> hand.Parts:
        moved = used * (outputs * inputs / 2 + outputs * inputs / 32) + 6 * (2 * inputs + 2 * outputs)
        return moved / MARLIN[1], 2 * 6 * outputs * inputs / MARLIN[0]

    attention = total(in_int4(3)(640 // devices, 256), in_int4(3)(256, 320 // devices))
    layer = total(attention, in_16_bit(3)(6, 256), experts(2 * inner, 256), experts(256, inner))
    read = 3 * 50 * 2 * 2 * (2 // devices) * 80 * 2 / BF16[1]
    parts = total(times(2, layer), in_16_bit(3)(1000 // devices, 256), (read, 0))
    check(shape, "w4a16", decode(3, 50), parts, layers=2, calls=5)

    def experts_in_int8(outputs: int, inputs: int, scales: float = 2) -> hand.Parts:
        """Two rows an expert at most are one row of tiles: 38 / 9 experts, and columns of 64."""
        moved = used * (outputs * inputs + scales * outputs) + 6 * (inputs + 2 * outputs)
        tiles = ceil(ceil(used * ceil(outputs / 64)) / 7) * 7 * 16 * 64
        return moved / hand.W8A8_BYTES + 3 * 3 * inputs / BF16[1], 2 * tiles * inputs / hand.W8A8_OPERATIONS

    # 10 or 5 tiles of 64 columns, and 4, in waves of 7.
    tiles = {(640, 256): 14, (256, 320): 7, (320, 256): 7, (256, 160): 7}
    qkv = in_int8(3, tiles, 16 * 64)(640 // devices, 256)
    out = in_int8(3, tiles, 16 * 64, 2 / devices)(256, 320 // devices)
    mlp = total(experts_in_int8(2 * inner, 256), experts_in_int8(256, inner, 2 / devices))
    layer = total(qkv, out, in_16_bit(3)(6, 256), mlp)
    parts = total(times(2, layer), in_16_bit(3)(1000 // devices, 256))
    check(shape, "w8a8", decode(3, 0), parts, layers=2, calls=5)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_hybrid(devices):
    """One of three layers attends; the others have two linears around a convolution. The head is tied.

    A convolution's state, two columns of 256, is read and written in every pass.
    """
    shape = model("hybrid").shape(("w4a16",), devices, {})
    call = in_int4(5)
    mlp = total(call(896 // devices, 256), call(256, 448 // devices))
    around = total(call(768 // devices, 256), call(256, 256 // devices))
    attention = total(call((4 + 2 * 2) * 64 // devices, 256), call(256, 256 // devices))
    read = 5 * 77 * 1 * 2 * (2 // devices) * 64 * 2 / BF16[1]
    state = 2 * 2 * 2 * 256 // devices * 2 / BF16[1]
    head = in_16_bit(5)(1000 // devices, 256)
    parts = total(times(3, mlp), times(2, around), attention, head, (read + 5 * state, 0))
    check(shape, "w4a16", decode(5, 77), parts, calls=4)
    pairs = 15 * 1 * (4 // devices) * 64 * 4 / hand.ATTENTION
    head = in_16_bit(1)(1000 // devices, 256)
    parts = total(times(3, mlp), times(2, around), attention, head, (state, pairs))
    check(shape, "w4a16", prefill(5), parts, calls=4)


def test_what_a_device_file_may_tell_of_kernels_and_of_what_is_between():
    """Humming, if there, is a choice; parts overlap; inputs and outputs move; INT8 takes its own time."""
    tokens, sizes = 5, (576, 320)
    alone, by_humming = hand.square("w4a16", *sizes), hand.square(HUMMING, *sizes)
    fast = UNLIKE.kernels["w4a16"].model_copy(update={"bytes_per_s": 400e9, "flops_per_s": 40e12})
    humming = UNLIKE.model_copy(update={"kernels": {**UNLIKE.kernels, HUMMING: fast}})
    assert linear_seconds(alone, tokens, humming) == linear_seconds(by_humming, tokens, humming)
    moved = alone.weight_bytes + tokens * 2 * (320 + 576)
    memory, compute = moved / MARLIN[1], 2 * tokens * 576 * 320 / MARLIN[0]
    alone = replace(alone, choice=(MARLIN_KERNEL,))
    assert linear_seconds(alone, tokens, UNLIKE) == pytest.approx(11e-6 + memory + compute, rel=1e-12)
    overlapping = UNLIKE.model_copy(update={"overlap": 2.0})
    assert linear_seconds(alone, tokens, overlapping) == pytest.approx(11e-6 + hypot(memory, compute))
    shape = model("dense").shape(("w4a16",), 1, load_policy("one-copy").derived)
    between = UNLIKE.model_copy(update={"between_bytes_per_s": 1e9})
    more = [pass_seconds(shape, "w4a16", decode(tokens, 0), device) for device in (between, UNLIKE)]
    numbers = 3 * (576 + 320 + 320 + 384 + 1280 + 320 + 320 + 640)
    assert more[0] - more[1] == pytest.approx(tokens * 2 * numbers / 1e9)
    told = UNLIKE.model_copy(update={"int8_from_int4_seconds": 0.5})
    linear = next(x for x in shape.linears["w8a8-from-int4"] if x.outputs == 576)
    quantised = 3 * tokens * 320 / BF16[1]
    expected = 0.5 * 576 * 320 / 1e6 + quantised
    assert roofline.preparation_seconds(linear, tokens, told) == pytest.approx(expected)
    nested = replace(linear, difference_bytes=linear.source_bytes + linear.weight_bytes)
    assert roofline.preparation_seconds(nested, tokens, told) == pytest.approx(2 * expected - quantised)
    both = [roofline.preparation_seconds(x, tokens, UNLIKE) for x in (nested, linear)]
    assert both[0] - both[1] == pytest.approx(nested.difference_bytes / BF16[1])


def test_a_call_alone_has_an_overhead_of_its_own():
    square = hand.square("w8a8")
    alone, in_pass = (linear_seconds(square, 3, UNLIKE, in_pass=which) for which in (False, True))
    assert alone - in_pass == pytest.approx((11 - 3) * 1e-6)


def test_experts_in_use_may_be_a_fraction_and_their_tiles_are_whole():
    """97 tokens use all 6 experts for 32.3 rows each, or 33; 3 use 38 / 9 of them, and 22 tiles."""
    experts = Linear(320, 256, 0, "w8a8", experts=6, active_experts=2)
    for tokens, tile in ((97, 64 * 96), (3, 16 * 64)):
        moved = 2 * tokens * (256 + 2 * 320)
        expected = 11e-6 + moved / hand.W8A8_BYTES + 2 * 28 * tile * 256 / hand.W8A8_OPERATIONS
        assert linear_seconds(experts, tokens, UNLIKE) == pytest.approx(expected, rel=1e-12)


def test_bytes_of_the_weights():
    """Beside the linears lie norms, the embedding, the head, routers and convolutions, 2 bytes a number."""
    linears = 576 * 320 + 320 * 384 + 1280 * 320 + 320 * 640
    outputs = 576 + 320 + 1280 + 320
    rest = 2 * (2 * 1001 * 320 + 3 * (320 + 320 + 48 + 48) + 320)
    both = model("dense").shape(("w8a8", "w4a16"), 1, {})
    assert both.own_bytes["w8a8"] == 3 * (linears + 2 * outputs)
    assert both.own_bytes["w4a16"] == 3 * (linears / 2 + linears / 32) and both.shared_bytes == rest
    assert both.resident_bytes == 3 * (linears * 1.53125 + 2 * outputs) + rest
    one = model("dense").shape(("w4a16",), 2, load_policy("one-copy").derived)
    assert one.resident_bytes == (3 * linears * 0.53125 + rest) / 2 + 640 * 320
    experts = 6 * (384 * 256 + 256 * 192)
    attention = 640 * 256 + 256 * 320
    in_int4 = model("mixture").shape(("w4a16",), 1, {})
    assert in_int4.own_bytes["w4a16"] == 2 * ((experts + attention) * 0.53125 + 2 * 6 * 256)
    assert in_int4.shared_bytes == 2 * (2 * 1000 * 256 + 2 * (256 + 256 + 80 + 80) + 256)
    in_int4 = model("hybrid").shape(("w4a16",), 1, {})
    mlps, convolved = 3 * 3 * 448 * 256, 2 * (768 * 256 + 256 * 256)
    assert in_int4.own_bytes["w4a16"] == (mlps + convolved + 512 * 256 + 256 * 256) * 0.53125
    assert in_int4.shared_bytes == 2 * (1000 * 256 + 3 * 2 * 256 + 2 * 256 * 3 + 2 * 64 + 256)


def test_tokens_that_the_cache_holds():
    """0.85 of 2 GiB, less 0.3 GiB and the weights, in whole tokens of 3 x 2 x 2 x 48 numbers.

    Requests of two layers that keep two columns of 256 numbers have these beside their tokens.
    """
    shape = model("dense").shape(("w8a8", "w4a16"), 1, {})
    left = 0.85 * 2 * 2**30 - 0.3 * 2**30 - shape.resident_bytes
    token = 3 * 2 * 2 * 48 * 2
    assert left % token and kv_cache_tokens(shape, UNLIKE, 0.85, 99) == int(left / token)
    hybrid = model("hybrid").shape(("w4a16",), 1, {})
    left, token, states = left + shape.resident_bytes - hybrid.resident_bytes, 2 * 2 * 64 * 2, 2 * 2 * 256 * 2
    assert (hybrid.kv_bytes_per_token, hybrid.state_bytes) == (token, states)
    assert kv_cache_tokens(hybrid, UNLIKE, 0.85, 10) == int(left / (token + states / 10))


CHUNKED = [Batch(100, 2, pairs=3050), Batch(20, 1, pairs=610), Batch(2, 2, 121)]
TWO_THEN_ONE = [Batch(20, 2, pairs=110), Batch(2, 2, 21), Batch(10, 1, pairs=55), Batch(1, 1, 10.5)]


@pytest.mark.parametrize(
    ("count", "prompt", "answer", "limits", "cache", "passes", "load"),
    [
        # 60 tokens in one pass, then two decode passes with 60 and 63 tokens in the cache.
        (3, 20, 3, (100, 8), 999, [Batch(60, 3, pairs=630), Batch(3, 3, 61.5)], Load(1, 1, 3)),
        # The second prompt's first chunk takes what the first prompt leaves, 40 of 100 tokens.
        (2, 60, 3, (100, 8), 999, CHUNKED, Load(1.5, 1.25, 4)),
        (1, 20, 1, (100, 8), 999, [Batch(20, 1, pairs=210)], Load(1, 0, 1)),
        # Two places, and then a cache of 38 tokens for requests of 13: the third comes after the others.
        (3, 10, 3, (100, 2), 999, TWO_THEN_ONE, Load(2, 1, 4)),
        (3, 10, 3, (100, 8), 38, TWO_THEN_ONE, Load(2, 1, 4)),
    ],
)
def test_passes_of_a_load(count, prompt, answer, limits, cache, passes, load):
    """All passes take a second."""
    found = []

    def seconds(phase: Phase, batch: Batch) -> float:
        assert (phase == "decode") == (batch.cached > 0)
        found.append(batch)
        return 1.0

    assert serve(Batches(prompt, answer, (count,)), count, Limits(*limits), cache, seconds) == load
    assert found == passes


def test_latencies_of_a_load():
    """Three requests of 4 + 201 tokens take a pass for prompts and 200 that read 4 to 203 tokens each."""
    way = find_way(try_ways(model("dense"), UNLIKE, Batches(4, 201, (3,)), 1, 0.85), "stock W4A16")
    shape = model("dense").shape(("w4a16",), 1, {})
    prompts = pass_seconds(shape, "w4a16", Batch(12, 3, pairs=3 * (1 + 2 + 3 + 4)), UNLIKE)
    each = [pass_seconds(shape, "w4a16", Batch(3, 3, 3 * cached), UNLIKE) for cached in range(4, 204)]
    load = way.loads[3]
    found = [load.ttft, load.tpot, load.request, way.seconds]
    request = prompts + sum(each)
    assert found == pytest.approx([prompts, sum(each) / 200, request, request], rel=1e-11, abs=0)
    assert way.weights_gib == shape.resident_bytes / 2**30
    assert way.kv_cache_tokens == kv_cache_tokens(shape, UNLIKE, 0.85, 205)


def test_a_cache_has_to_hold_a_request():
    """What is left may be a fraction of a token."""
    weights = model("dense").shape(("w4a16",), 1, {}).resident_bytes
    for spare, tokens in ((0.5, 202), (0, 202), (-0.5, None)):
        memory = weights + UNLIKE.reserve_bytes + 202 * 3 * 2 * 2 * 48 * 2 + spare
        device = UNLIKE.model_copy(update={"memory_bytes": memory})
        way = find_way(try_ways(model("dense"), device, Batches(1, 201, (1,)), 1, 1.0), "stock W4A16")
        assert (way.kv_cache_tokens, bool(way.loads)) == (tokens, tokens is not None)


def test_default_limits_are_those_of_vllm(monkeypatch):
    """vLLM's own rules say so, once told the names and memory of the shipped devices."""
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    def of_vllm(devices: int) -> tuple[int, int]:
        tokens, sequences = EngineArgs.get_batch_defaults(devices)
        return tokens[UsageContext.OPENAI_API_SERVER], sequences[UsageContext.OPENAI_API_SERVER]

    if current_platform.is_cpu():
        for devices in (1, 2):
            assert Limits.of(load_device("cpu-2-core"), devices) == of_vllm(devices)
    platform = type(current_platform)
    gpus = [device for name in builtin_names(PACKAGE) if (device := load_device(name)).is_gpu]
    assert len(gpus) > 9
    for gpu in gpus:
        name, memory = f"{gpu.name} {gpu.description}", int(gpu.memory_bytes)
        with monkeypatch.context() as patch:
            patch.setattr(platform, "is_cpu", lambda _: False)
            patch.setattr(platform, "get_device_name", lambda *_, name=name: name)
            patch.setattr(platform, "get_device_total_memory", lambda *_, size=memory: size)
            assert Limits.of(gpu) == of_vllm(1), name
