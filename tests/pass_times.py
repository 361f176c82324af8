# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Made-up times of passes, and traces replayed with them."""

from __future__ import annotations

from collections.abc import Mapping

from flexquant.planning.pass_cost import PassCost
from flexquant.planning.replaying import Replay, replay
from flexquant.planning.server import Limits
from flexquant.planning.times import route_table
from flexquant.planning.trace import Request
from flexquant.policy.pass_times import PassTimes, Time
from flexquant.policy.rules import load_policy

# A decode pass takes 10 ms a sequence, prefill 1 ms a token, of one prompt or many; context costs nothing.
LINEAR = {"w8a8": ({1: 0.010}, {1: 0.001})}
# W8A8 is quick in prefill, W4A16 in decode.
CROSSED = {"w8a8": ({1: 0.010}, {1: 0.001}), "w4a16": ({1: 0.004}, {1: 0.003})}
CPU_LIMITS = (2048, 128, None, 128, (), False)
"""Limits of ``vllm serve`` on a CPU."""


def make_times(
    curves: Mapping[str, tuple[Mapping[int, float], Mapping[int, float]]] = LINEAR,
    context: int = 1,
    context_seconds: float = 0.0,
) -> PassTimes:
    """Return pass times without spread; ``curves``: variant -> seconds of decode and of prefill by size."""
    decode, prefill = (
        {
            name: {size: Time(seconds, seconds, seconds) for size, seconds in pair[side].items()}
            for name, pair in curves.items()
        }
        for side in (0, 1)
    )
    return PassTimes(decode, prefill, context, context_seconds, {"machine": "made up"})


def run_trace(
    trace: list[Request], limits: Limits, policy: str = "w8a8", times: PassTimes | None = None
) -> Replay:
    """Replay a trace under a policy, named or a file."""
    times = times or make_times()
    return replay(trace, route_table(load_policy(policy), times, limits), PassCost(times), limits)


def passes(result: Replay) -> list[tuple[float, float, str, int, int]]:
    """Return (start ms, ms, phase, tokens, sequences) of every pass."""
    return [
        (round(1e3 * p.start, 6), round(1e3 * p.seconds, 6), p.phase, p.tokens, p.sequences)
        for p in result.passes
    ]
