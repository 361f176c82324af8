# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""CUDA graphs, and the limits of a server by its machine and options."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks.simulation import limits_of
from benchmarks.speed.servers import ServerOptions
from flexquant.planning.pass_cost import PassCost
from flexquant.planning.replaying import replay
from flexquant.planning.server import Limits, Machine, default_capture_sizes, server_limits
from flexquant.planning.times import route_table
from flexquant.planning.trace import Request
from flexquant.policy.rules import parse_policy
from flexquant.policy.schema import SCHEMA
from tests.pass_times import CPU_LIMITS, CROSSED, make_times, passes, run_trace

GIB = 2**30


def test_default_capture_sizes_are_those_of_vllm() -> None:
    assert default_capture_sizes(4, 2048) == (1, 2, 4, 8)
    assert default_capture_sizes(13, 2048) == (1, 2, 4, 8, 13, 16, 24)
    assert default_capture_sizes(13, 19) == (1, 2, 4, 8, 13, 16, 19)
    sizes = default_capture_sizes(1024, 8192)
    assert sizes == default_capture_sizes(256, 8192)
    assert default_capture_sizes(1024, 8192, largest=0) == ()
    assert sizes[:5] == (1, 2, 4, 8, 16) and sizes[32:36] == (240, 248, 256, 272) and sizes[-1] == 512


def test_passes_are_padded_to_the_next_capture_size() -> None:
    limits = Limits(capture_sizes=(1, 2, 4, 8, 16))
    assert [limits.padded(n) for n in (1, 3, 8, 9, 16, 17)] == [1, 4, 8, 16, 16, 17]
    assert Limits().padded(3) == 3
    # A sequence takes 10 ms, a token 1 ms: 3 prompts of 3 tokens, then 3 sequences in the graph of 4.
    assert passes(run_trace([Request(0, 3, 2)] * 3, limits)) == [
        (0, 16, "prefill", 9, 3),
        (16, 40, "decode", 3, 3),
    ]
    assert passes(run_trace([Request(0, 17, 1)], limits)) == [(0, 17, "prefill", 17, 1)]


def test_the_padded_batch_size_decides() -> None:
    rules = [{"when": {"phase": "decode", "batch_size": {"max": 3}}, "use": "w4a16"}, {"use": "w8a8"}]
    policy, times = parse_policy({"schema": SCHEMA, "rules": rules}), make_times(CROSSED)
    plans: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    for sizes in ((), (1, 2, 4)):
        limits = Limits(2048, 3, capture_sizes=sizes)
        table = route_table(policy, times, limits)
        assert table.intervals("decode")[-1].max_tokens == limits.max_decode_tokens
        result = replay([Request(0, 5, 2)] * 3, table, PassCost(times), limits)
        plans[sizes] = [(p.plan, p.tokens) for p in result.passes if p.phase == "decode"]
    assert plans == {(): [("w4a16", 3)], (1, 2, 4): [("w8a8", 3)]}


H100 = Machine("NVIDIA H100 80GB HBM3", 79.2 * GIB)
A100 = Machine("NVIDIA A100-SXM4-80GB", 79.3 * GIB)


@pytest.mark.parametrize(
    ("origin", "machine", "limits"),
    [
        (
            {"machine": {"gpu": H100.gpu, "gpu_memory_gib": 79.2}, "engine_arguments": {}},
            H100,
            (8192, 1024, None, 16, default_capture_sizes(1024, 8192), True),
        ),
        (
            {"machine": {"gpu": A100.gpu, "gpu_memory_gib": 79.3}},
            A100,
            (2048, 256, None, 16, default_capture_sizes(256, 2048), True),
        ),
        (
            {"machine": {"gpu": "NVIDIA H20"}, "engine_arguments": {"enforce_eager": True}},
            Machine("NVIDIA H20", eager=True),
            (2048, 256, None, 16, (), True),
        ),
        (
            {"machine": {"cpu": "AMD EPYC", "gpu": None}, "engine_arguments": {"tensor_parallel_size": 2}},
            Machine(devices=2),
            (4096, 256, None, 128, (), False),
        ),
        ({"machine": "made up", "engine_arguments": {"tensor_parallel_size": "two"}}, Machine(), CPU_LIMITS),
        ({}, Machine(), CPU_LIMITS),
    ],
)
def test_limits_are_those_of_the_machine_that_was_measured(
    origin: dict[str, Any], machine: Machine, limits: tuple[Any, ...]
) -> None:
    found = Machine.of_times(dataclasses.replace(make_times(), origin=origin))
    assert found == machine
    assert server_limits(found) == Limits(*limits)


@pytest.mark.parametrize(
    ("gpu", "tokens"),
    [
        ("NVIDIA B200", 1024),
        ("NVIDIA GB300", 1024),
        ("b200 NVIDIA B200 SXM, 180 GB", 1024),
        ("NVIDIA H200", 512),
    ],
)
def test_blackwell_has_larger_graphs(gpu: str, tokens: int) -> None:
    assert server_limits(Machine(gpu, 180 * GIB)).capture_sizes[-1] == tokens


def test_given_limits_are_kept() -> None:
    given = (100, 50, 800, 32, (1, 8, 200), False)
    assert server_limits(H100, *given) == Limits(100, 50, 800, 32, (1, 8), False)
    assert server_limits(H100, max_num_batched_tokens=100).max_num_seqs == 100  # as vLLM lowers its default
    assert server_limits(Machine(), async_scheduling=True).async_scheduling
    assert str(server_limits(H100)) == (
        "8192 tokens and 1024 sequences in a pass, blocks of 16, CUDA graphs up to 512, asynchronous "
        "scheduling"
    )
    assert str(Limits(*CPU_LIMITS)).endswith("blocks of 128, no CUDA graphs, synchronous scheduling")


def test_limits_are_those_of_the_server() -> None:
    # vLLM keeps one block for padding.
    options = ServerOptions(100, 8, eager=False, kv_cache_gib=1, memory_share=0.9)
    assert limits_of(options, 2048, 70, None) == Limits(2048, 8, 69 * 128, 128)
    limits = limits_of(options, 2048, 71, "NVIDIA H20")
    assert limits == Limits(2048, 8, 70 * 16, 16, (1, 2, 4, 8, 16), True)
    eager = dataclasses.replace(options, eager=True)
    assert limits_of(eager, 2048, None, "NVIDIA H20") == Limits(2048, 8, None, 16, (), True)
