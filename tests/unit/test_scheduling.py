# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Schedules of the simulator: worked out by hand, and what must always hold."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.arrivals import BUILTIN
from flexquant.errors import FlexQuantError, UsageError
from flexquant.planning.scheduler import Scheduler, Sequence
from flexquant.planning.server import Limits
from flexquant.planning.simulation_report import summarise_replay
from flexquant.planning.trace import Request, read_trace
from tests.pass_times import make_times, passes, run_trace

# schedules by hand


def test_one_request() -> None:
    result = run_trace([Request(2.0, 100, 3)], Limits())
    assert passes(result) == [
        (2000, 100, "prefill", 100, 1),
        (2100, 10, "decode", 1, 1),
        (2110, 10, "decode", 1, 1),
    ]
    found = summarise_replay(result)
    assert found["mean_ttft_ms"] == pytest.approx(100)
    assert found["mean_tpot_ms"] == pytest.approx(10)
    assert found["p99_itl_ms"] == pytest.approx(10)
    assert found["makespan_s"] == pytest.approx(0.120)
    assert found["output_throughput"] == pytest.approx(3 / 0.120)


def test_chunked_prefill_leaves_decode_its_token() -> None:
    result = run_trace(
        [Request(0, 10, 4), Request(0, 50, 2)], Limits(max_num_batched_tokens=32, max_num_seqs=2)
    )
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
    assert summarise_replay(result)["mean_tpot_ms"] == pytest.approx((59 / 3 + 20) / 2)


def test_a_request_that_comes_during_a_pass_waits_for_its_end() -> None:
    result = run_trace([Request(0, 10, 2), Request(0.001, 10, 1), Request(5, 10, 1)], Limits())
    assert passes(result) == [
        (0, 10, "prefill", 10, 1),
        (10, 11, "mixed", 11, 2),
        (5000, 10, "prefill", 10, 1),
    ]
    assert summarise_replay(result)["busy"] == pytest.approx(31 / 5010)


def test_a_prompt_of_one_token_is_a_decode_pass_to_the_router() -> None:
    assert passes(run_trace([Request(0, 1, 1)], Limits())) == [(0, 10, "decode", 1, 1)]


def test_max_num_seqs_is_kept_and_the_first_come_are_first_served() -> None:
    trace = [Request(0, 10, 3), Request(0, 10, 5), Request(0, 10, 1), Request(0, 10, 1)]
    result = run_trace(trace, Limits(max_num_seqs=2))
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
    assert passes(run_trace([Request(0, 12, 2), Request(0, 25, 1)], limits)) == [
        (0, 12, "prefill", 12, 1),
        (12, 10, "decode", 1, 1),
        (22, 15, "prefill", 15, 1),
        (37, 10, "prefill", 10, 1),
    ]


def test_the_latest_is_preempted_and_computed_again() -> None:
    # 3 blocks of 4: both prompts of 4 take one each; the first to grow takes the third, the next none.
    result = run_trace([Request(0, 4, 4), Request(0, 4, 4)], Limits(kv_cache_tokens=12, block_size=4))
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
    assert summarise_replay(result)["preemptions"] == 1


def test_a_sequence_in_prefill_can_be_preempted_too() -> None:
    # 3 blocks of 10; both need a block at 10 tokens: the first takes the last one.
    trace = [Request(0, 10, 3), Request(0, 15, 2)]
    result = run_trace(trace, Limits(18, 18, kv_cache_tokens=30, block_size=10))
    assert passes(result)[:2] == [(0, 18, "prefill", 18, 2), (18, 10, "decode", 1, 1)]
    assert result.sequences[1].preemptions == 1
    assert result.sequences[1].generated == 2


# asynchronous scheduling

ASYNC = Limits(async_scheduling=True)


def test_a_request_that_comes_during_a_pass_waits_for_the_next_one_too() -> None:
    result = run_trace([Request(0, 10, 3), Request(0.005, 20, 1), Request(5, 10, 1)], ASYNC)
    assert passes(result) == [
        (0, 10, "prefill", 10, 1),
        (10, 10, "decode", 1, 1),  # scheduled at 0 ms
        (20, 21, "mixed", 21, 2),  # scheduled at 10 ms
        (5000, 10, "prefill", 10, 1),
    ]
    assert [s.first_token for s in result.sequences] == pytest.approx([0.010, 0.041, 5.010])


def test_a_sequence_holds_its_place_until_its_last_token_is_known() -> None:
    trace = [Request(0, 10, 2), Request(0, 10, 5), Request(0, 10, 1)]
    assert passes(run_trace(trace, dataclasses.replace(ASYNC, max_num_seqs=2))) == [
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
    result = run_trace([Request(0, 4, 2), Request(0, 4, 1)], limits)
    assert passes(result) == [(0, 8, "prefill", 8, 2), (8, 10, "decode", 1, 1)]
    assert [s.preemptions for s in result.sequences] == [0, 1]
    result = run_trace([Request(0, 4, 2), Request(0, 4, 3)], limits)
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
    result = run_trace(trace, limits, times=times)
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
    found = summarise_replay(result)
    assert sum(found["time_per_plan"].values()) == pytest.approx(1)
    assert sum(row["passes"] for row in found["passes"]) == len(result.passes)
    assert 0 < found["busy"] <= 1


def test_blocks_are_given_back() -> None:
    limits = Limits(64, 4, kv_cache_tokens=160)
    scheduler = Scheduler(limits)
    scheduler.waiting.extend(Sequence(Request(0, 60, 30)) for _ in range(6))
    while batch := scheduler.schedule():
        held = sum(limits.blocks_of(s.computed) for s in scheduler.running)
        assert 0 <= scheduler.free_blocks == limits.blocks - held
        scheduler.complete(batch)
    assert scheduler.free_blocks == limits.blocks == 10
    assert not scheduler.running and not scheduler.waiting


# what is refused


def test_limits_that_vllm_refuses() -> None:
    with pytest.raises(UsageError, match="max-num-batched-tokens is 16, but .* 256 sequences"):
        Limits(max_num_batched_tokens=16)


def test_a_request_that_never_fits() -> None:
    limits = Limits(kv_cache_tokens=100)  # 6 blocks of 16
    assert run_trace([Request(0, 90, 7)], limits).sequences[0].generated == 7
    with pytest.raises(FlexQuantError, match="request 2 of the trace needs 97 tokens .* has 6 blocks of 16"):
        run_trace([Request(0, 10, 1), Request(0, 90, 8)], limits)
