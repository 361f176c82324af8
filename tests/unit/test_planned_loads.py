# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Bytes of weights, tokens of the KV cache, and requests that arrive at once, worked out by hand."""

from __future__ import annotations

import pytest

from flexquant.planning.advising import find_way, kv_cache_tokens, try_ways
from flexquant.planning.device import builtin_devices, load_device
from flexquant.planning.roofline import Batch, Batches, Limits, Load, pass_seconds, serve
from flexquant.policy.rules import load_policy
from flexquant.policy.schema import Phase
from tests.prediction import UNLIKE, model


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
    assert kv_cache_tokens(shape, UNLIKE, 0.85) == int(left / token)


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
def test_passes_of_a_load(
    count: int, prompt: int, answer: int, limits: tuple[int, int], cache: int, passes: list[Batch], load: Load
) -> None:
    """All passes take a second."""
    found = []

    def seconds(phase: Phase, batch: Batch) -> float:
        assert (phase == "decode") == (batch.cached > 0)
        found.append(batch)
        return 1.0

    assert serve(Batches(prompt, answer, (count,)), count, Limits(*limits), cache, seconds) == load
    assert found == passes


def test_latencies_of_a_load() -> None:
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
    assert way.kv_cache_tokens == kv_cache_tokens(shape, UNLIKE, 0.85)


def test_a_cache_has_to_hold_a_request() -> None:
    """What is left may be a fraction of a token."""
    weights = model("dense").shape(("w4a16",), 1, {}).resident_bytes
    for spare, tokens in ((0.5, 202), (0, 202), (-0.5, None)):
        memory = weights + UNLIKE.reserve_bytes + 202 * 3 * 2 * 2 * 48 * 2 + spare
        device = UNLIKE.model_copy(update={"memory_bytes": memory})
        way = find_way(try_ways(model("dense"), device, Batches(1, 201, (1,)), 1, 1.0), "stock W4A16")
        assert (way.kv_cache_tokens, bool(way.loads)) == (tokens, tokens is not None)


def test_default_limits_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
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
    gpus = [device for name in builtin_devices() if (device := load_device(name)).is_gpu]
    assert len(gpus) > 9
    for gpu in gpus:
        name, memory = f"{gpu.name} {gpu.description}", int(gpu.memory_bytes)
        with monkeypatch.context() as patch:
            patch.setattr(platform, "is_cpu", lambda _: False)
            patch.setattr(platform, "get_device_name", lambda *_, name=name: name)
            patch.setattr(platform, "get_device_total_memory", lambda *_, size=memory: size)
            assert Limits.of(gpu) == of_vllm(1), name
