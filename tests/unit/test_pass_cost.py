# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The time of a simulated pass: contexts, pairs of tokens, padding."""

from __future__ import annotations

import pytest

from flexquant.errors import FlexQuantError
from flexquant.planning.pass_cost import PassCost
from flexquant.planning.scheduler import Chunk, Sequence
from flexquant.planning.trace import Request
from flexquant.policy.pass_times import PassTimes
from flexquant.policy.plans import Plan
from tests.pass_times import make_times


def seconds(times: PassTimes, phase: str, *chunks: tuple[int, int], padding: int = 0) -> float:
    """Return the time of a pass; ``chunks`` has (tokens, context) of every sequence."""
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
    # The curve is exactly a + b n + p n^2 / 2, with p = 4e-8.
    curve = {n: 1e-3 + 1e-4 * n + 2e-8 * n * n for n in (16, 64, 128, 256, 512, 1024, 2048)}
    times = make_times({"w8a8": ({1: 0.01}, curve)}, context=1, context_seconds=1e-6)
    assert PassCost(times).pair_seconds == pytest.approx(4e-8, rel=1e-6)
    assert seconds(times, "prefill", (1024, 0)) == pytest.approx(curve[1024])
    assert seconds(times, "prefill", (512, 0), (512, 0)) == pytest.approx(curve[1024] - 4e-8 * 512**2)
    assert seconds(times, "prefill", (1024, 1024)) == pytest.approx(curve[1024] + 4e-8 * 1024**2)
    mixed = seconds(times, "mixed", (255, 0), (1, 3000))
    assert mixed == pytest.approx(curve[256] + 3000e-6 + 4e-8 * (255**2 - 256**2) / 2)


def test_small_prompts_say_nothing_of_pairs_and_variants_count_alike() -> None:
    """Sizes below a sixteenth of the largest are left out; one variant has 4e-8 a pair, the other 2e-8."""
    sizes = (128, 256, 512, 1024, 2048)
    first, second = ({n: 1e-3 + 1e-4 * n + half * n * n for n in sizes} for half in (2e-8, 1e-8))
    small = {16: 0.7, 64: 0.3, 127: 0.9}
    curves = {"w8a8": ({1: 0.01}, small | first), "w4a16": ({1: 0.01}, second)}
    assert PassCost(make_times(curves, 1, 1e-6)).pair_seconds == pytest.approx(3e-8, rel=1e-6)


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
    with pytest.raises(FlexQuantError, match="one sequence takes 10 ms, but its 15 tokens of context"):
        PassCost(make_times(context=15, context_seconds=1e-3))
    assert PassCost(make_times(context=9, context_seconds=1e-3)).times.context == 9
