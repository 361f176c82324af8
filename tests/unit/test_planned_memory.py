# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Bytes of weights, tokens of the KV cache and latencies of a load, worked out by hand."""

from __future__ import annotations

import pytest

from flexquant.planning.advising import find_way, kv_cache_tokens, try_ways
from flexquant.planning.device import Device, parse_device
from flexquant.planning.roofline import Batches
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
    left = 0.85 * 2 * 2**30 - 0.3 * 2**30 - shape.resident_bytes
    token = 3 * 2 * 2 * 48 * 2
    assert left % token
    assert kv_cache_tokens(shape, DEVICE, 0.85) == int(left / token)


def on_cpu() -> Device:
    """Return the device without processors and tiles."""
    lines = [
        line for line in DEVICE_FILE.splitlines() if not line.startswith("processors") and "tiles" not in line
    ]
    file = "\n".join([*lines, "  w8a8: {tflops: 6, gb_per_s: 70}"])
    return parse_device(file.encode(), "cpu.yaml", "cpu")


def test_latencies_of_a_load() -> None:
    """Three requests of 1 + 201 tokens on a CPU take 201 decode passes, with 0, 1 ... 200 in the cache."""
    way = find_way(try_ways(model("dense"), on_cpu(), Batches(1, 201, (3,)), 1, 0.85), "stock W4A16")
    token = 3 * 2 * 2 * 48 * 2 / BF16[1]
    parts = total(times(3, dense_layer(in_int4(3))), in_16_bit(3)(1001, 320))
    empty = sum(parts) + ((3 * 4 + 1) * 3 + 3 * 13 + 170) * 1e-6
    each = [empty + token * 3 * cached for cached in range(201)]
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
