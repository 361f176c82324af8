# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a server counts of its passes: their times on a CPU, and the counters of several engines in sum."""

from __future__ import annotations

import torch

from flexquant.serving.frontend.endpoints import add_up
from flexquant.serving.worker.pass_times import PassClock


def test_a_pass_is_timed_once_and_only_if_it_began() -> None:
    timed: list[tuple[str, float]] = []
    timer: PassClock[str] = PassClock(
        torch.device("cpu"), lambda label, seconds: timed.append((label, seconds))
    )
    timer.end("never begun")
    timer.begin()
    timer.end("first")
    timer.end("first, asked for its logits again")
    timer.begin()
    timer.begin()
    timer.end("after one without logits")
    assert [label for label, _ in timed] == ["first", "after one without logits"]
    assert all(seconds >= 0 for _, seconds in timed)


def test_counters_of_engines_are_added_by_plan_and_phase() -> None:
    engines = [
        [
            {"plan": "w8a8", "phase": "prefill", "forward": 2.0, "tokens": 30.0},
            {"plan": "w8a8", "phase": "decode", "forward": 5.0},
        ],
        [{"plan": "w8a8", "phase": "prefill", "forward": 1.0, "tokens": 12.0}],
    ]
    assert add_up(engines) == [
        {"plan": "w8a8", "phase": "prefill", "forward": 3.0, "tokens": 42.0},
        {"plan": "w8a8", "phase": "decode", "forward": 5.0},
    ]
