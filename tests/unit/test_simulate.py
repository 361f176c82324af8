# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Replaying traces: schedules worked out by hand, what must always hold, what a policy gains, wrong input."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulation import find_trace, limits_of, sent_requests
from benchmarks.speed.servers import ServerOptions
from flexquant import cli
from flexquant.checkpoint import MergedConfig, Variant
from flexquant.errors import FlexQuantError, UsageError
from flexquant.merge import merge_checkpoints
from flexquant.pass_times import PassTimes, Time
from flexquant.policy import SCHEMA, load_policy, parse_policy
from flexquant.prediction.model_shape import read_model_shape
from flexquant.routes import Plan
from flexquant.simulation.arrivals import BUILTIN, make_builtin, make_trace
from flexquant.simulation.pass_cost import PassCost
from flexquant.simulation.replaying import Replay, replay
from flexquant.simulation.report import compare, format_table, summarise
from flexquant.simulation.scheduler import Chunk, Limits, Scheduler, Sequence
from flexquant.simulation.server import Machine, default_capture_sizes, server_limits
from flexquant.simulation.times import check_times, find_times, route_table
from flexquant.simulation.trace import Request, builtin_traces, read_trace, write_trace
from tests.checkpoints import make_checkpoint

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
# Decode: 10 ms a sequence; prefill: 1 ms a token, of one prompt or of many; context for nothing.
LINEAR = {"w8a8": ({1: 0.010}, {1: 0.001})}
# W8A8 is quick in prefill, W4A16 in decode.
CROSSED = {"w8a8": ({1: 0.010}, {1: 0.001}), "w4a16": ({1: 0.004}, {1: 0.003})}
GIB = 2**30
CPU = (2048, 128, None, 128, (), False)
"""Limits of 'vllm serve' on a CPU."""


def make_times(
    curves: Mapping[str, tuple[Mapping[int, float], Mapping[int, float]]] = LINEAR,
    context: int = 1,
    context_seconds: float = 0.0,
) -> PassTimes:
    decode, prefill = (
        {
            name: {size: Time(seconds, seconds, seconds) for size, seconds in pair[side].items()}
            for name, pair in curves.items()
        }
        for side in (0, 1)
    )
    return PassTimes(decode, prefill, context, context_seconds, {"machine": "made up"})


def run(trace: list[Request], limits: Limits, policy: str = "w8a8", times: PassTimes | None = None) -> Replay:
    times = times or make_times()
    return replay(trace, route_table(load_policy(policy), times, limits), PassCost(times), limits)


def passes(result: Replay) -> list[tuple[float, float, str, int, int]]:
    """(start ms, ms, phase, tokens, sequences) of every pass."""
    return [
        (round(1e3 * p.start, 6), round(1e3 * p.seconds, 6), p.phase, p.tokens, p.sequences)
        for p in result.passes
    ]


# schedules by hand


def test_one_request() -> None:
    result = run([Request(2.0, 100, 3)], Limits())
    assert passes(result) == [
        (2000, 100, "prefill", 100, 1),
        (2100, 10, "decode", 1, 1),
        (2110, 10, "decode", 1, 1),
    ]
    found = summarise(result)
    assert found["mean_ttft_ms"] == pytest.approx(100)
    assert found["mean_tpot_ms"] == pytest.approx(10)
    assert found["p99_itl_ms"] == pytest.approx(10)
    assert found["makespan_s"] == pytest.approx(0.120)
    assert found["output_throughput"] == pytest.approx(3 / 0.120)


def test_chunked_prefill_leaves_decode_its_token() -> None:
    result = run([Request(0, 10, 4), Request(0, 50, 2)], Limits(max_num_batched_tokens=32, max_num_seqs=2))
    assert passes(result) == [
        (0, 32, "prefill", 32, 2),  # 10 + the first 22 of 50
        (32, 29, "mixed", 29, 2),  # 1 + the last 28
        (61, 20, "decode", 2, 2),
        (81, 10, "decode", 1, 1),
    ]
    first, second = result.sequences
    assert (first.first_token, second.first_token) == pytest.approx((0.032, 0.061))
    assert (first.last_token, second.last_token) == pytest.approx((0.091, 0.081))
    assert sorted(result.gaps) == pytest.approx([0.010, 0.020, 0.020, 0.029])
    assert summarise(result)["mean_tpot_ms"] == pytest.approx((59 / 3 + 20) / 2)


def test_a_request_that_comes_during_a_pass_waits_for_its_end() -> None:
    result = run([Request(0, 10, 2), Request(0.001, 10, 1), Request(5, 10, 1)], Limits())
    assert passes(result) == [
        (0, 10, "prefill", 10, 1),
        (10, 11, "mixed", 11, 2),
        (5000, 10, "prefill", 10, 1),
    ]
    assert summarise(result)["busy"] == pytest.approx(31 / 5010)


def test_a_prompt_of_one_token_is_a_decode_pass_to_the_router() -> None:
    assert passes(run([Request(0, 1, 1)], Limits())) == [(0, 10, "decode", 1, 1)]


def test_max_num_seqs_is_kept_and_the_first_come_are_first_served() -> None:
    trace = [Request(0, 10, 3), Request(0, 10, 5), Request(0, 10, 1), Request(0, 10, 1)]
    result = run(trace, Limits(max_num_seqs=2))
    assert passes(result) == [
        (0, 20, "prefill", 20, 2),
        (20, 20, "decode", 2, 2),
        (40, 20, "decode", 2, 2),  # the first is served, the third takes its place
        (60, 11, "mixed", 11, 2),
        (71, 11, "mixed", 11, 2),
    ]
    assert [s.first_token for s in result.sequences] == pytest.approx([0.020, 0.020, 0.071, 0.082])


def test_a_prompt_is_admitted_only_when_the_cache_has_room_for_all_of_it() -> None:
    # 4 blocks of 10: the second prompt needs 3, though its first chunk would fit beside the first's 2.
    limits = Limits(15, 15, kv_cache_tokens=40, block_size=10)
    assert passes(run([Request(0, 12, 2), Request(0, 25, 1)], limits)) == [
        (0, 12, "prefill", 12, 1),
        (12, 10, "decode", 1, 1),
        (22, 15, "prefill", 15, 1),
        (37, 10, "prefill", 10, 1),
    ]


def test_the_latest_is_preempted_and_computed_again() -> None:
    # 3 blocks of 4: both prompts of 4 take one each; the first to grow takes the third, the next none.
    result = run([Request(0, 4, 4), Request(0, 4, 4)], Limits(kv_cache_tokens=12, block_size=4))
    assert passes(result) == [
        (0, 8, "prefill", 8, 2),
        (8, 10, "decode", 1, 1),  # the second lost its block
        (18, 10, "decode", 1, 1),  # its prompt of 4 + 1 tokens needs two blocks, one is free
        (28, 10, "decode", 1, 1),
        (38, 5, "prefill", 5, 1),
        (43, 10, "decode", 1, 1),
        (53, 10, "decode", 1, 1),
    ]
    assert [s.preemptions for s in result.sequences] == [0, 1]
    assert [s.generated for s in result.sequences] == [4, 4]
    assert max(result.gaps) == pytest.approx(0.035)  # from its first token to the next
    assert summarise(result)["preemptions"] == 1


def test_a_sequence_in_prefill_can_be_preempted_too() -> None:
    # 3 blocks of 10; both need a block at 10 tokens: the first takes the last one.
    trace = [Request(0, 10, 3), Request(0, 15, 2)]
    result = run(trace, Limits(18, 18, kv_cache_tokens=30, block_size=10))
    assert passes(result)[:2] == [(0, 18, "prefill", 18, 2), (18, 10, "decode", 1, 1)]
    assert result.sequences[1].preemptions == 1
    assert result.sequences[1].generated == 2


# asynchronous scheduling

ASYNC = Limits(async_scheduling=True)


def test_a_request_that_comes_during_a_pass_waits_for_the_next_one_too() -> None:
    result = run([Request(0, 10, 3), Request(0.005, 20, 1), Request(5, 10, 1)], ASYNC)
    assert passes(result) == [
        (0, 10, "prefill", 10, 1),
        (10, 10, "decode", 1, 1),  # scheduled at 0 ms
        (20, 21, "mixed", 21, 2),  # scheduled at 10 ms
        (5000, 10, "prefill", 10, 1),
    ]
    assert [s.first_token for s in result.sequences] == pytest.approx([0.010, 0.041, 5.010])


def test_a_sequence_holds_its_place_until_its_last_token_is_known() -> None:
    trace = [Request(0, 10, 2), Request(0, 10, 5), Request(0, 10, 1)]
    assert passes(run(trace, dataclasses.replace(ASYNC, max_num_seqs=2))) == [
        (0, 20, "prefill", 20, 2),
        (20, 20, "decode", 2, 2),  # the first gets its last token
        (40, 10, "decode", 1, 1),  # scheduled before
        (50, 11, "mixed", 11, 2),
        (61, 10, "decode", 1, 1),
    ]


def test_a_preempted_sequence_still_gets_the_token_that_was_on_the_way() -> None:
    # Blocks of 4; the second loses its only one when the first needs another, during the pass that gives both
    # their first token.
    limits = dataclasses.replace(ASYNC, kv_cache_tokens=8, block_size=4)
    result = run([Request(0, 4, 2), Request(0, 4, 1)], limits)
    assert passes(result) == [(0, 8, "prefill", 8, 2), (8, 10, "decode", 1, 1)]
    assert [s.preemptions for s in result.sequences] == [0, 1]
    result = run([Request(0, 4, 2), Request(0, 4, 3)], limits)
    assert passes(result) == [
        (0, 8, "prefill", 8, 2),
        (8, 10, "decode", 1, 1),
        (18, 5, "prefill", 5, 1),
        (23, 10, "decode", 1, 1),
    ]
    assert [s.preemptions for s in result.sequences] == [0, 1]
    assert [s.generated for s in result.sequences] == [2, 3]


# what must always hold


@pytest.mark.parametrize("kv_cache_tokens", [None, 3000])
@pytest.mark.parametrize("budget", [64, 8192])
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("name", BUILTIN)
def test_every_token_is_served_in_time(
    name: str, async_scheduling: bool, budget: int, kv_cache_tokens: int | None
) -> None:
    trace = read_trace(name)
    limits = Limits(budget, 40, kv_cache_tokens, async_scheduling=async_scheduling)
    times = make_times({"w8a8": ({1: 0.01, 64: 0.02}, {16: 0.01, 1024: 0.05})}, 64, 1e-7)
    result = run(trace, limits, times=times)
    ends = [0.0, *(p.start + p.seconds for p in result.passes)]
    assert all(p.start >= end - 1e-9 for p, end in zip(result.passes, ends, strict=False))
    assert all(p.seconds > 0 and p.tokens <= budget and p.sequences <= 40 for p in result.passes)
    assert all(s.generated == s.request.output for s in result.sequences)
    assert all(s.request.arrival < s.first_token <= s.last_token for s in result.sequences)
    assert len(result.gaps) == sum(r.output - 1 for r in trace) and min(result.gaps) > 0
    computed = sum(r.input + r.output - 1 for r in trace)
    preemptions = sum(s.preemptions for s in result.sequences)
    assert (sum(p.tokens for p in result.passes) > computed) == (preemptions > 0)
    assert (preemptions > 0) == (kv_cache_tokens is not None)
    found = summarise(result)
    assert sum(found["time_per_plan"].values()) == pytest.approx(1)
    assert sum(row["passes"] for row in found["passes"]) == len(result.passes)
    assert 0 < found["busy"] <= 1


def test_blocks_are_given_back() -> None:
    limits = Limits(64, 4, kv_cache_tokens=160)
    scheduler = Scheduler(limits)
    scheduler.waiting.extend(Sequence(Request(0, 60, 30)) for _ in range(6))
    while batch := scheduler.schedule():
        assert scheduler.free_blocks + sum(s.blocks for s in scheduler.running) == limits.blocks
        assert scheduler.free_blocks >= 0
        scheduler.complete(batch)
    assert scheduler.free_blocks == limits.blocks == 10
    assert not scheduler.running and not scheduler.waiting


# time of a pass


def seconds(times: PassTimes, phase: str, *chunks: tuple[int, int], padding: int = 0) -> float:
    """The time of a pass; ``chunks``: (tokens, context) of every sequence."""
    batch = [Chunk(Sequence(Request(0, 1, 1)), tokens, context, True) for tokens, context in chunks]
    padded = sum(tokens for tokens, _ in chunks) + padding
    return PassCost(times).seconds(Plan("w8a8", ("w8a8",)), phase, batch, padded)


def test_contexts_other_than_measured_cost_or_save_time() -> None:
    times = make_times({"w8a8": ({1: 0.010, 2: 0.012}, {1: 0.001})}, context=100, context_seconds=1e-5)
    assert seconds(times, "decode", (1, 100), (1, 100)) == pytest.approx(0.012)
    assert seconds(times, "decode", (1, 400), (1, 100)) == pytest.approx(0.012 + 300e-5)
    assert seconds(times, "decode", (1, 100), (1, 1)) == pytest.approx(0.012 - 99e-5)
    assert seconds(times, "decode", (1, 0)) == pytest.approx(0.009)


def test_a_decode_pass_is_never_quicker_than_one_sequence_without_context() -> None:
    times = make_times({"w8a8": ({1: 0.010, 8: 0.011}, {1: 0.001})}, context=100, context_seconds=2e-5)
    assert seconds(times, "decode", *[(1, 0)] * 8) == pytest.approx(0.010 - 100 * 2e-5)


def test_prefill_attention_counts_pairs_of_tokens() -> None:
    # Exactly a + b n + p n^2 / 2, with p = 4e-8.
    curve = {n: 1e-3 + 1e-4 * n + 2e-8 * n * n for n in (16, 64, 128, 256, 512, 1024, 2048)}
    times = make_times({"w8a8": ({1: 0.01}, curve)}, context=1, context_seconds=1e-6)
    assert PassCost(times).pair_seconds == pytest.approx(4e-8, rel=1e-6)
    assert seconds(times, "prefill", (1024, 0)) == pytest.approx(curve[1024])
    assert seconds(times, "prefill", (512, 0), (512, 0)) == pytest.approx(curve[1024] - 4e-8 * 512**2)
    assert seconds(times, "prefill", (1024, 1024)) == pytest.approx(curve[1024] + 4e-8 * 1024**2)
    mixed = seconds(times, "mixed", (255, 0), (1, 3000))
    assert mixed == pytest.approx(curve[256] + 3000e-6 + 4e-8 * (255**2 - 256**2) / 2)


def test_a_pair_of_tokens_costs_at_most_what_it_costs_in_decode() -> None:
    curve = {n: 2e-8 * n * n for n in (256, 512, 1024, 2048)}
    assert PassCost(make_times({"w8a8": ({1: 1.0}, curve)}, 1, 3e-8)).pair_seconds == pytest.approx(3e-8)
    concave = {n: n**0.5 for n in (256, 512, 1024, 2048)}
    assert PassCost(make_times({"w8a8": ({1: 1.0}, concave)}, 1, 3e-8)).pair_seconds == 0


def test_contexts_without_a_cost_say_nothing_of_pairs() -> None:
    curve = {n: 2e-8 * n * n for n in (256, 512, 1024, 2048)}
    assert PassCost(make_times({"w8a8": ({1: 1.0}, curve)}, 1, 0.0)).pair_seconds == pytest.approx(4e-8)


def test_padding_has_no_context_and_no_pairs() -> None:
    curve = {n: 1e-3 + 1e-4 * n + 2e-8 * n * n for n in (16, 64, 128, 256, 512, 1024, 2048)}
    times = make_times({"w8a8": ({1: 0.01, 4: 0.012, 8: 0.02}, curve)}, context=100, context_seconds=1e-6)
    decode = seconds(times, "decode", (1, 100), (1, 100), (1, 700), padding=1)
    assert decode == pytest.approx(0.012 + (900 - 400) * 1e-6)
    prefill = seconds(times, "prefill", (500, 0), padding=12)
    assert prefill == pytest.approx(curve[512] + 4e-8 * (500**2 - 512**2) / 2)


def test_a_pass_is_never_quicker_than_its_longest_chunk_alone() -> None:
    curve = {128: 0.010, 256: 0.012, 512: 0.020, 1000: 0.060, 1024: 0.060, 2048: 0.2}
    times = make_times({"w8a8": ({1: 1.0}, curve)}, 1, 1e-3)
    assert PassCost(times).pair_seconds > 0
    assert seconds(times, "mixed", (1000, 0), *[(1, 0)] * 24) == pytest.approx(0.060)


def test_times_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(FlexQuantError, match="64 tokens of context alone 64 ms .*; measure again"):
        PassCost(make_times(context=64, context_seconds=1e-3))


# CUDA graphs, and the limits of a server


def test_default_capture_sizes_are_those_of_vllm() -> None:
    assert default_capture_sizes(4, 2048) == (1, 2, 4, 8)
    assert default_capture_sizes(13, 2048) == (1, 2, 4, 8, 13, 16, 24)
    assert default_capture_sizes(13, 19) == (1, 2, 4, 8, 13, 16, 19)
    sizes = default_capture_sizes(1024, 8192)
    assert sizes == default_capture_sizes(256, 8192)
    assert sizes[:5] == (1, 2, 4, 8, 16) and sizes[32:36] == (240, 248, 256, 272) and sizes[-1] == 512


def test_passes_are_padded_to_the_next_capture_size() -> None:
    limits = Limits(capture_sizes=(1, 2, 4, 8, 16))
    assert [limits.padded(n) for n in (1, 3, 8, 9, 16, 17)] == [1, 4, 8, 16, 16, 17]
    assert Limits().padded(3) == 3
    # 10 ms a sequence, 1 ms a token: 3 prompts of 3 tokens, then 3 sequences in the graph of 4.
    assert passes(run([Request(0, 3, 2)] * 3, limits)) == [(0, 16, "prefill", 9, 3), (16, 40, "decode", 3, 3)]
    assert passes(run([Request(0, 17, 1)], limits)) == [(0, 17, "prefill", 17, 1)]


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
        ({"machine": "made up", "engine_arguments": {"tensor_parallel_size": "two"}}, Machine(), CPU),
        ({}, Machine(), CPU),
    ],
)
def test_limits_are_those_of_the_machine_that_was_measured(
    origin: dict[str, Any], machine: Machine, limits: tuple[Any, ...]
) -> None:
    found = Machine.of_times(dataclasses.replace(make_times(), origin=origin))
    assert found == machine
    assert server_limits(found) == Limits(*limits)


def test_given_limits_are_kept() -> None:
    given = (100, 50, 800, 32, (1, 8, 200), False)
    assert server_limits(H100, *given) == Limits(100, 50, 800, 32, (1, 8), False)
    assert server_limits(H100, max_num_batched_tokens=100).max_num_seqs == 100  # as vLLM lowers its default
    assert server_limits(Machine(), async_scheduling=True).async_scheduling
    assert str(server_limits(H100)) == (
        "8192 tokens and 1024 sequences in a pass, blocks of 16, CUDA graphs up to 512, asynchronous "
        "scheduling"
    )
    assert str(Limits(*CPU)).endswith("blocks of 128, no CUDA graphs, synchronous scheduling")


# policies


def test_the_right_variant_for_each_phase_beats_both() -> None:
    trace = make_trace(60, 5, 1, 40, 20, 0.5, seed=1)
    times = make_times(CROSSED)
    found = {name: summarise(run(trace, Limits(), name, times)) for name in ("w8a8", "w4a16", "phase")}
    for static in ("w8a8", "w4a16"):
        for key in ("mean_ttft_ms", "mean_tpot_ms"):
            assert found["phase"][key] < found[static][key]
    assert {(row["phase"], row["plan"]) for row in found["phase"]["passes"]} == {
        ("prefill", "w8a8"),
        ("mixed", "w8a8"),
        ("decode", "w4a16"),
    }
    ratios = compare(found)
    assert set(ratios["w8a8"].values()) == {1.0}
    assert ratios["phase"]["mean_tpot_ms"] == pytest.approx(
        found["phase"]["mean_tpot_ms"] / found["w8a8"]["mean_tpot_ms"]
    )
    table = format_table(found)
    assert "relative to w8a8" in table and "time per plan" in table


def test_the_batch_size_decides_by_the_number_of_sequences() -> None:
    rules = [{"when": {"phase": "decode", "batch_size": {"max": 1}}, "use": "w4a16"}, {"use": "w8a8"}]
    policy = parse_policy({"schema": SCHEMA, "rules": rules})
    times, limits = make_times(CROSSED), Limits()
    trace = [Request(0, 5, 2), Request(0, 5, 3)]
    result = replay(trace, route_table(policy, times, limits), PassCost(times), limits)
    assert [(p.phase, p.plan) for p in result.passes] == [
        ("prefill", "w8a8"),
        ("decode", "w8a8"),
        ("decode", "w4a16"),
    ]


def test_layers_need_the_model_and_share_the_time() -> None:
    policy, times, limits = load_policy("phase-batch-layer"), make_times(CROSSED), Limits()
    with pytest.raises(FlexQuantError, match="names layers, but how many .* give .* with --model"):
        route_table(policy, times, limits)
    model = MergedConfig("LlamaForCausalLM", {name: Variant(f"{name}.", {}) for name in CROSSED}), 10
    plan = route_table(policy, times, limits, model).lookup("decode", 1)
    assert plan.layers.count("w8a8") == 5
    batch = [Chunk(Sequence(Request(0, 1, 1)), 1, 1, True)]
    assert PassCost(times).seconds(plan, "decode", batch, 1) == pytest.approx(0.007)


def test_a_derived_variant_needs_times_of_its_own() -> None:
    policy = load_policy("phase-batch-w4a8")
    with pytest.raises(FlexQuantError, match="uses 'w4a8', but there are times for w8a8, w4a16 only"):
        check_times("phase-batch-w4a8", policy, make_times(CROSSED))
    times = make_times({**CROSSED, "w4a8": CROSSED["w8a8"]})
    check_times("phase-batch-w4a8", policy, times)
    table = route_table(policy, times, Limits())
    assert {v for plan in table.plans for v in plan.variants} == set(policy.variants)


def test_limits_that_vllm_refuses() -> None:
    with pytest.raises(UsageError, match="max-num-batched-tokens is 16, but .* 256 sequences"):
        Limits(max_num_batched_tokens=16)


def test_a_request_that_never_fits() -> None:
    limits = Limits(kv_cache_tokens=100)  # 6 blocks of 16
    assert run([Request(0, 90, 7)], limits).sequences[0].generated == 7
    with pytest.raises(FlexQuantError, match="request 2 of the trace needs 97 tokens .* has 6 blocks of 16"):
        run([Request(0, 10, 1), Request(0, 90, 8)], limits)


# traces


def test_builtin_traces_are_what_the_seed_makes() -> None:
    assert builtin_traces() == sorted(BUILTIN)
    for name in BUILTIN:
        assert read_trace(name) == make_builtin(name)


def test_builtin_traces_differ_in_their_arrivals_only() -> None:
    steady, bursty = make_builtin("steady"), make_builtin("bursty")
    assert [r[1:] for r in steady] == [r[1:] for r in bursty]
    assert steady[-1].arrival == bursty[-1].arrival == pytest.approx(159 / 4)

    def busiest_second(trace: list[Request]) -> int:
        return max(sum(r.arrival <= s.arrival < r.arrival + 1 for s in trace) for r in trace)

    assert busiest_second(bursty) > 2 * busiest_second(steady)


def test_a_trace_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n" + write_trace([Request(0.5, 3, 2), Request(0.5, 1, 1)]) + "\n")
    assert read_trace(str(path)) == [Request(0.5, 3, 2), Request(0.5, 1, 1)]


GOOD = '{"arrival": 1, "input": 2, "output": 3}\n'


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", ": the trace is empty; write one request a line"),
        ("\n\n", ": the trace is empty"),
        (GOOD + "arrival: 1", ", line 2: not valid JSON"),
        (GOOD + "[1, 2, 3]", r", line 2: is \[1, 2, 3\]; write an object"),
        (GOOD + '{"arrival": 1, "input": 2}', ", line 2: lacks the key 'output'"),
        (GOOD.replace("}", ', "id": 1}'), ", line 1: id is an unknown key; .* arrival, input, output"),
        (GOOD.replace("1", "-0.5"), ", line 1: arrival is -0.5; give seconds, a number of at least 0"),
        (GOOD.replace("1", "NaN"), ", line 1: arrival is NaN"),
        (GOOD.replace("1", "Infinity"), ", line 1: arrival is Infinity"),
        (GOOD.replace("1", "true"), ", line 1: arrival is true"),
        (GOOD.replace("2", "0"), ", line 1: input is 0; give tokens, a whole number of at least 1"),
        (GOOD.replace("3", "0"), ", line 1: output is 0"),
        (GOOD.replace("3", "2.5"), ", line 1: output is 2.5"),
        (GOOD + GOOD.replace("1", "0.5"), ", line 2: arrival is 0.5, before the 1 .*; sort the lines"),
        (b"\xff", ": not UTF-8 text"),
    ],
)
def test_bad_traces(tmp_path: Path, content: str | bytes, problem: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FlexQuantError, match=f"{path}{problem}"):
        read_trace(str(path))


def test_an_unknown_trace() -> None:
    with pytest.raises(FlexQuantError, match="unknown trace 'calm': the built-in ones are bursty, steady"):
        read_trace("calm")


# the check against a real server


def test_what_a_client_sent_is_what_is_simulated() -> None:
    found = {"start_times": [105.0, 104.5], "input_lens": [7, 9], "output_lens": [2, 3]}
    assert sent_requests(found) == [Request(0, 9, 3), Request(0.5, 7, 2)]


def test_limits_are_those_of_the_server() -> None:
    # 70 blocks of 128 hold 70 sequences of 100 tokens, which vLLM tells as 7000; one block is padding's.
    options = ServerOptions(100, 8, eager=False, kv_cache_gib=1, memory_share=0.9)
    assert limits_of(options, 2048, 7000, None) == Limits(2048, 8, 69 * 128, 128)
    # 71 blocks of 16, 7 a sequence: 71 / 7 * 100 tokens, rounded down.
    limits = limits_of(options, 2048, 1014, "NVIDIA H20")
    assert limits == Limits(2048, 8, 70 * 16, 16, (1, 2, 4, 8, 16), True)
    eager = dataclasses.replace(options, eager=True)
    assert limits_of(eager, 2048, None, "NVIDIA H20") == Limits(2048, 8, None, 16, (), True)


def test_a_random_trace_is_written_like_a_workload() -> None:
    trace = find_trace("30x100+10@2~0.5", burstiness=1)
    assert len(trace) == 30 and trace[-1].arrival == pytest.approx(29 / 2)
    assert all(50 <= r.input <= 150 and 5 <= r.output <= 15 for r in trace)
    assert find_trace("steady", burstiness=1) == make_builtin("steady")


# command line


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A policy file with the crossed times, and the one subcommand."""
    monkeypatch.setattr(cli, "SUBCOMMANDS", ("simulate",))
    document = {**load_policy("phase").document, "measured": make_times(CROSSED).to_data()}
    path = tmp_path / "tuned.yaml"
    path.write_text(json.dumps(document))  # JSON is YAML
    return str(path)


def command(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[list[str], dict[str, Any]]:
    assert cli.main(["simulate", *argv, "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    return lines, json.loads(last)


def test_cli_compares_policies(capsys: pytest.CaptureFixture[str], tuned: str) -> None:
    policies = ["--policy", "w8a8", "--policy", "w4a16", "--policy", tuned]
    lines, found = command(capsys, "--trace", "bursty", *policies)
    assert list(found["results"]) == ["w8a8", "w4a16", "tuned.yaml"]
    assert found["times"] == {"source": tuned, "origin": {"machine": "made up"}}
    assert found["trace"]["requests"] == 160
    assert found["limits"] == json.loads(json.dumps(dataclasses.asdict(Limits(*CPU))))
    assert found["relative_to_first"]["tuned.yaml"]["mean_tpot_ms"] < 1
    assert lines[0].startswith("bursty: 160 requests in 39.75 s, ")
    assert lines[1].startswith("limits: 2048 tokens and 128 sequences in a pass, ")
    assert [line.split()[0] for line in lines[4:7]] == ["w8a8", "w4a16", "tuned.yaml"]
    assert lines[7] == "relative to w8a8"
    assert lines[-1].startswith("tuned.yaml") and "w4a16" in lines[-1] and "prefill" in lines[-1]


def test_cli_speed_brings_requests_closer(capsys: pytest.CaptureFixture[str], tuned: str) -> None:
    arguments = ["--trace", "steady", "--policy", "w8a8", "--times", tuned]
    (_, once), (_, faster) = (command(capsys, *arguments, "--speed", speed) for speed in ("0.1", "4"))
    assert faster["trace"]["seconds"] == pytest.approx(once["trace"]["seconds"] / 40)
    assert faster["results"]["w8a8"]["mean_ttft_ms"] > once["results"]["w8a8"]["mean_ttft_ms"]


def test_cli_takes_the_times_and_the_policy_stored_in_the_model(
    capsys: pytest.CaptureFixture[str], tuned: str, tmp_path: Path
) -> None:
    variants = {name: Variant(f"{name}.", {}) for name in CROSSED}
    config = MergedConfig("LlamaForCausalLM", variants, policy=load_policy(tuned).document)
    (tmp_path / "config.json").write_text(
        json.dumps({"num_hidden_layers": 6, "quantization_config": config.to_json()})
    )
    names = ("stored", "phase-batch-layer")
    policies = [part for name in names for part in ("--policy", name)]
    _, found = command(capsys, "--trace", "steady", *policies, "--model", str(tmp_path))
    assert found["times"]["source"] == "the checkpoint's policy"
    assert "w8a8+w4a16[4]" in found["results"]["phase-batch-layer"]["time_per_plan"]


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("simulate")
    sources = {scheme: make_checkpoint(folder / scheme, scheme=scheme) for scheme in CROSSED}
    merge_checkpoints(sources, folder / "merged")
    return str(folder / "merged")


def test_cli_predicts_the_times_of_a_device(
    capsys: pytest.CaptureFixture[str], tuned: str, merged: str
) -> None:
    policies = ["--policy", "w8a8", "--policy", "w4a8"]
    _, found = command(capsys, "--trace", "steady", *policies, "--device", "h100", "--model", merged)
    assert found["times"]["source"] == found["times"]["origin"]["device"] == "h100"
    assert found["results"]["w4a8"]["time_per_plan"] == pytest.approx({"w4a8": 1})


def test_cli_takes_the_kv_cache_that_the_loaded_variants_leave(
    capsys: pytest.CaptureFixture[str], tuned: str, merged: str
) -> None:
    arguments = ["--trace", "steady", "--device", "cpu-2-core", "--model", merged]
    lines, found = command(capsys, *arguments, "--policy", "w8a8", "--policy", "phase")
    shape = read_model_shape(merged)
    for name, variants in (("w8a8", ["w8a8"]), ("phase", ["w8a8", "w4a16"])):
        left = (0.9 * 23 - 1) * 2**30 - shape.bytes_of(variants)
        assert found["kv_cache_tokens"][name] == int(left / shape.kv_bytes_per_token)
    assert lines[2] == "KV cache: w8a8 {w8a8} tokens, phase {phase} tokens".format(**found["kv_cache_tokens"])
    _, found = command(capsys, *arguments, "--policy", "w8a8", "--tensor-parallel-size", "2")
    assert found["kv_cache_tokens"]["w8a8"] > 1.9 * (0.9 * 23 - 1) * 2**30 / shape.kv_bytes_per_token
    _, found = command(capsys, *arguments, "--policy", "w8a8", "--kv-cache-tokens", "4096")
    assert found["kv_cache_tokens"] == {"w8a8": 4096}


@pytest.mark.parametrize(
    ("device", "sizes", "expected"),
    [
        ("l4", [], list(default_capture_sizes(256, 2048))),
        ("h100", [], list(default_capture_sizes(1024, 8192))),
        ("l4", ["--capture-sizes", "none"], []),
        ("l4", ["--capture-sizes", "8,4,9000,4"], [4, 8]),
        ("cpu-2-core", [], []),
    ],
)
def test_cli_pads_passes_on_gpus(
    capsys: pytest.CaptureFixture[str],
    tuned: str,
    merged: str,
    tmp_path: Path,
    device: str,
    sizes: list[str],
    expected: list[int],
) -> None:
    (tmp_path / "one.jsonl").write_text(write_trace([Request(0, 5, 2)]))
    arguments = ["--trace", str(tmp_path / "one.jsonl"), "--policy", "w8a8", "--device", device]
    _, found = command(capsys, *arguments, "--model", merged, *sizes)
    assert found["limits"]["capture_sizes"] == expected


def test_cli_refuses_a_model_that_does_not_fit(tuned: str, merged: str, tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(write_trace([Request(0, 100_000_000, 1)]))
    arguments = ["--trace", str(tmp_path / "long.jsonl"), "--policy", "w8a8"]
    for device in ("l4", "cpu-2-core"):
        argv = ["simulate", *arguments, "--device", device, "--model", merged]
        args = cli.build_parser().parse_args(argv)
        with pytest.raises(FlexQuantError, match=rf"does not fit on {device}: .* \(w8a8\), "):
            args.run(args)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--policy", "w8a8"], "none of the policies w8a8 has measured times; measure .* 'flexquant tune'"),
        (["--policy", "w8a8", "--times", "phase"], "phase has no measured times"),
        (["--policy", "{tuned}", "--policy", "fp8-phase-batch"], "uses 'fp8', but there are times for w8a8"),
        (["--policy", "{tuned}", "--policy", "w5a5"], "unknown policy 'w5a5'.*variant .*w8a8, w4a16"),
        (["--policy", "{tuned}", "--policy", "phase-batch-layer"], "give the merged checkpoint with --model"),
        (["--policy", "{tuned}", "--kv-cache-tokens", "8"], "request 1 of the trace needs"),
        (["--policy", "{tuned}", "--policy", "/.{tuned}"], "two policies are named 'tuned.yaml'"),
        (["--policy", "{tuned}", "--model", "nowhere"], "nowhere/config.json cannot be read"),
        (["--policy", "w8a8", "--device", "h100"], "predicts the times of a model; give .* with --model"),
        (["--policy", "{tuned}", "--tensor-parallel-size", "2"], "is for predicted times, .* give --device"),
    ],
)
def test_cli_refuses(capsys: pytest.CaptureFixture[str], tuned: str, argv: list[str], problem: str) -> None:
    argv = [part.replace("{tuned}", tuned) for part in argv]
    with pytest.raises(FlexQuantError, match=problem):
        args = cli.build_parser().parse_args(["simulate", "--trace", "bursty", *argv])
        args.run(args)
    assert cli.main(["simulate", "--trace", "bursty", *argv]) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("flexquant simulate: error: ")


@pytest.mark.parametrize("speed", ["0", "-1", "inf", "nan", "fast"])
def test_cli_wrong_usage(capsys: pytest.CaptureFixture[str], tuned: str, speed: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--trace", "bursty", "--policy", tuned, "--speed", speed])
    assert f"'{speed}' is not a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize("sizes", ["", "0", "8,", "8, 16", "all"])
def test_cli_wrong_capture_sizes(capsys: pytest.CaptureFixture[str], tuned: str, sizes: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--trace", "bursty", "--policy", tuned, "--capture-sizes", sizes])
    assert f"'{sizes}' is neither 'none' nor" in capsys.readouterr().err


def test_times_of_the_first_policy_that_has_some(tuned: str) -> None:
    assert find_times(["w8a8", "phase", tuned])[1] == tuned
    assert find_times(["w8a8"], given=tuned)[0].variants == ("w8a8", "w4a16")


def test_a_real_server_took_as_long_as_simulated() -> None:
    """The committed rounds of benchmarks/simulation.py: means within 20 % of what the client measured."""
    document = json.loads((RESULTS / "simulation-cpu.json").read_text())
    assert list(document["results"]) == ["phase-batch", "w8a8", "w4a16"]
    for rounds in document["results"].values():
        assert len(rounds) == 2
        for found in rounds:
            for key in ("mean_ttft_ms", "mean_tpot_ms", "output_throughput"):
                assert found["simulated"][key] == pytest.approx(found["measured"][key], rel=0.2)
