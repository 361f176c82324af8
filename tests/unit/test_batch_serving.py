# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Requests that arrive at once: their passes by hand, with little room too, and vLLM's default limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexquant.planning.device import builtin_devices, load_device
from flexquant.planning.roofline import Batch, Batches, Limits, Load, serve_batch
from flexquant.policy.schema import Phase

LIMITS = Limits(tokens=100, sequences=8, block_size=16, graphs=())
Passes = list[tuple[Phase, Batch]]


def served(
    count: int, tokens: tuple[int, int], limits: Limits = LIMITS, cache: int = 10_000
) -> tuple[Load, Passes]:
    """Serve requests of (prompt, answer) tokens; a pass takes a second. Return the passes too."""
    passes: Passes = []

    def seconds(phase: Phase, batch: Batch) -> float:
        passes.append((phase, batch))
        return 1.0

    return serve_batch(Batches(*tokens, (count,)), count, limits, cache, seconds), passes


def test_prompts_come_together_and_are_decoded_together() -> None:
    load, passes = served(3, (20, 3))
    assert passes == [
        ("prefill", Batch(60, 3, 0, 3 * 210)),
        ("decode", Batch(3, 3, 60)),
        ("decode", Batch(3, 3, 63)),
    ]
    assert load == Load(ttft=1, tpot=1, request=3)


def test_a_long_prompt_is_computed_in_chunks_beside_sequences_that_decode() -> None:
    """The second prompt's first chunk takes what the budget leaves, 40 of 100 tokens."""
    load, passes = served(2, (60, 3))
    assert passes == [
        ("prefill", Batch(100, 2, 0, 60 * 30.5 + 40 * 20.5)),
        ("mixed", Batch(21, 2, 60, 20 * (40 + 10.5))),
        ("decode", Batch(2, 2, 61 + 60)),
        ("decode", Batch(1, 1, 61)),
    ]
    assert (load.ttft, load.tpot, load.request) == (1.5, 1, 3.5)


def test_passes_are_padded_to_the_next_graph() -> None:
    _, passes = served(3, (17, 2), replace(LIMITS, graphs=(1, 2, 4, 8)))
    assert [batch.tokens for _, batch in passes] == [51, 4]


def test_requests_wait_for_a_place() -> None:
    load, passes = served(3, (10, 3), replace(LIMITS, sequences=2))
    assert [(phase, batch.sequences) for phase, batch in passes] == [
        *(("prefill", 2), ("decode", 2), ("decode", 2)),
        *(("prefill", 1), ("decode", 1), ("decode", 1)),
    ]
    assert load.ttft == pytest.approx((1 + 1 + 4) / 3)


def test_requests_wait_for_blocks_of_their_prompt() -> None:
    """Three blocks of 16 hold one prompt of 20 tokens, and not two."""
    _, passes = served(2, (20, 2), cache=3 * 16)
    assert [(phase, batch.sequences) for phase, batch in passes] == 2 * [("prefill", 1), ("decode", 1)]


def test_the_sequence_admitted_last_is_preempted_and_computed_again() -> None:
    """Two prompts of 16 fill two of three blocks; the second sequence finds no block for token 17."""
    load, passes = served(2, (16, 4), cache=3 * 16)
    assert passes == [
        ("prefill", Batch(32, 2, 0, 2 * 136)),
        *(("decode", Batch(1, 1, cached)) for cached in (16, 17, 18)),
        ("prefill", Batch(17, 1, 0, 17 * 9)),
        *(("decode", Batch(1, 1, cached)) for cached in (17, 18)),
    ]
    assert (load.ttft, load.request) == (1, (4 + 7) / 2)


def test_default_limits_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own rules say so, once told the names and memory of the shipped devices."""
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    def of_vllm(devices: int) -> tuple[int, int]:
        tokens, sequences = EngineArgs.get_batch_defaults(devices)
        return tokens[UsageContext.OPENAI_API_SERVER], sequences[UsageContext.OPENAI_API_SERVER]

    def ours(limits: Limits) -> tuple[int, int]:
        return limits.tokens, limits.sequences

    if current_platform.is_cpu():
        for devices in (1, 2):
            assert ours(Limits.of(load_device("cpu-2-core"), devices)) == of_vllm(devices)
    platform = type(current_platform)
    gpus = [device for name in builtin_devices() if (device := load_device(name)).is_gpu]
    assert len(gpus) > 9
    for gpu in gpus:
        name, memory = f"{gpu.name} {gpu.description}", int(gpu.memory_bytes)
        with monkeypatch.context() as patch:
            patch.setattr(platform, "is_cpu", lambda _: False)
            patch.setattr(platform, "get_device_name", lambda *_, name=name: name)
            patch.setattr(platform, "get_device_total_memory", lambda *_, size=memory: size)
            assert ours(Limits.of(gpu)) == of_vllm(1), name


def test_graphs_are_those_that_vllm_captures() -> None:
    """On Blackwell they are larger, and up to twice as many tokens as there are sequences."""
    graphs = Limits.of(load_device("l20")).graphs
    assert graphs[:5] == (1, 2, 4, 8, 16) and graphs[32:36] == (240, 248, 256, 272)
    assert graphs[-1] == Limits.of(load_device("h200")).graphs[-1] == 512
    assert Limits.of(load_device("b200")).graphs[-1] == 1024
    assert Limits.of(load_device("cpu-2-core")).graphs == ()
