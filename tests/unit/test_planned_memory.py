# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Bytes of weights, tokens of the KV cache and latencies of a load, worked out by hand."""

from __future__ import annotations

from math import log

import pytest

from flexquant.errors import FlexQuantError
from flexquant.planning.advising import Batches, find_way, try_ways
from flexquant.planning.device import Device, parse_device
from flexquant.planning.predicting import kv_cache_tokens, roofline_pass_times
from flexquant.planning.roofline import pass_cost
from flexquant.policy.rules import load_policy
from tests.costs_by_hand import (
    BF16,
    DEVICE,
    DEVICE_FILE,
    dense_layer,
    in_16_bit,
    in_int4,
    model,
    times,
    total,
)


def test_bytes_of_the_weights() -> None:
    """Beside the linears lie norms, the embedding, the head, routers and convolutions, 2 bytes a number."""
    linears = 576 * 320 + 320 * 384 + 1280 * 320 + 320 * 640
    outputs = 576 + 320 + 1280 + 320
    rest = 2 * (2 * 1001 * 320 + 3 * (320 + 320 + 48 + 48) + 320)
    both = model("dense").shape(("w8a8", "w4a16"), 1, {})
    assert both.own_bytes["w8a8"] == 3 * (linears + 2 * outputs)
    assert both.own_bytes["w4a16"] == 3 * (linears / 2 + linears / 32)
    assert both.shared_bytes == rest
    assert both.resident_bytes == 3 * (linears * 1.53125 + 2 * outputs) + rest
    assert both.bytes_of(["w4a16"]) == 3 * linears * 0.53125 + rest
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


def test_tokens_that_the_cache_holds() -> None:
    """0.85 of 2 GiB, less 0.3 GiB and the weights, in whole tokens of 3 x 2 x 2 x 48 numbers."""
    shape = model("dense").shape(("w8a8", "w4a16"), 1, {})
    weights, token = shape.resident_bytes, 3 * 2 * 2 * 48 * 2
    left = 0.85 * 2 * 2**30 - 0.3 * 2**30 - weights
    assert left % token
    assert kv_cache_tokens(shape, DEVICE, 100, 0.85) == int(left / token)
    alone = int((left + shape.own_bytes["w8a8"]) / token)
    assert kv_cache_tokens(shape, DEVICE, 100, 0.85, ["w4a16"]) == alone
    fitting = int(left / token)
    assert kv_cache_tokens(shape, DEVICE, fitting, 0.85) == fitting
    with pytest.raises(FlexQuantError, match=r"0\.85 of its 2 GiB is 1\.7 GiB"):
        kv_cache_tokens(shape, DEVICE, fitting + 1, 0.85)


def test_times_of_passes_are_those_of_the_terms() -> None:
    shape = model("dense").shape(("w8a8", "w4a16"), 1, {})
    found = roofline_pass_times(shape, DEVICE, 77)
    assert found.context == 77
    assert found.context_seconds == pytest.approx(3 * 2 * 2 * 48 * 2 / BF16[1], rel=1e-12, abs=0)
    for variant in ("w8a8", "w4a16"):
        assert found.decode[variant][8].median == pass_cost(shape, variant, "decode", 8, 77, DEVICE).seconds
        assert (
            found.prefill[variant][64].median == pass_cost(shape, variant, "prefill", 64, 0, DEVICE).seconds
        )
    assert found.origin == {"device": DEVICE.name, "description": "no two numbers alike"}


def on_cpu() -> Device:
    """Return the device without processors and tiles."""
    lines = [
        line for line in DEVICE_FILE.splitlines() if not line.startswith("processors") and "tiles" not in line
    ]
    file = "\n".join([*lines, "  w8a8: {tflops: 6, gb_per_s: 70}"])
    return parse_device(file.encode(), "cpu.yaml", "cpu")


def test_latencies_of_a_load() -> None:
    """Three requests of 1 + 201 tokens on a CPU take 201 passes that decode, with 0, 1 ... 200 in the cache.

    A pass of three lies between those of two and four in the logarithms of time and size, where sequences
    have 1 + 100 tokens in the cache.
    """
    way = find_way(try_ways(model("dense"), on_cpu(), Batches(1, 201, (3,)), 1, 0.85), "stock W4A16")
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
    weights = model("dense").shape(("w4a16",), 1, {}).resident_bytes
    assert way.weights_gib == weights / 2**30
    assert way.kv_cache_tokens == int((0.85 * 2 * 2**30 - 0.3 * 2**30 - weights) / (token * BF16[1]))


def test_answers_of_one_token_take_no_time_after_it() -> None:
    load = find_way(try_ways(model("dense"), on_cpu(), Batches(4, 1, (2,)), 1, 0.85), "stock W4A16").loads[2]
    assert load.tpot == 0 and load.request == load.ttft > 0


def test_a_cache_has_to_hold_the_blocks_of_a_request() -> None:
    """A CPU's blocks have 128 tokens, so a request of 202 needs 256; what is left may be a fraction."""
    cpu, weights = on_cpu(), model("dense").shape(("w4a16",), 1, {}).resident_bytes
    for spare, tokens in ((0.5, 256), (0, 256), (-0.5, None)):
        memory = weights + cpu.reserve_bytes + 256 * 3 * 2 * 2 * 48 * 2 + spare
        outcomes = try_ways(
            model("dense"), cpu.model_copy(update={"memory_bytes": memory}), Batches(1, 201, (1,)), 1, 1.0
        )
        way = find_way(outcomes, "stock W4A16")
        assert (way.kv_cache_tokens, bool(way.loads)) == (tokens, tokens is not None)
