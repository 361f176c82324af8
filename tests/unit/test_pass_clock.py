# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a server counts of its passes: their times on a CPU, and the counters of several engines in sum."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from flexquant.serving.frontend.endpoints import add_up
from flexquant.serving.worker.pass_records import PassClock, PlanCounters


def test_a_pass_is_timed_once_and_only_if_it_began() -> None:
    timer = PassClock(torch.device("cpu"))

    def is_timed() -> bool:
        counters = PlanCounters(forward_seconds=-1.0)
        timer.end()
        timer.count(counters)
        assert counters.forward_seconds >= -1
        return counters.forward_seconds != -1

    assert not is_timed(), "it never began"
    timer.begin()
    assert is_timed()
    assert not is_timed(), "the first pass was asked for its logits again"
    timer.begin()
    timer.begin()
    assert is_timed(), "the pass before had no logits"


class Event:
    """Stands in for an event of a GPU, whose stream has come as far as ``reached``."""

    made: ClassVar[int] = 0
    stream: ClassVar[int] = 0
    reached: ClassVar[int] = 0

    def __init__(self, *_: object, enable_timing: bool) -> None:
        assert enable_timing
        Event.made += 1

    def record(self) -> None:
        Event.stream += 1
        self.place = Event.stream

    def query(self) -> bool:
        return self.place <= Event.reached

    def elapsed_time(self, later: Event) -> float:
        return 1000.0 * (later.place - self.place)


def test_on_a_gpu_events_are_made_before_the_passes_and_read_once_they_have_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "Event", Event)
    timer, passes = PassClock(torch.device("cuda")), [PlanCounters() for _ in range(151)]
    made = Event.made
    assert Event.stream == made, "an event takes its place on the GPU when it is recorded first"
    for number in range(100):
        timer.begin()
        if number % 3 == 0:
            timer.begin()  # the pass before had no logits
        timer.end()
        timer.count(passes[number])
        Event.reached = Event.stream - 3  # the GPU is a pass and a half behind
    assert [counters.forward_seconds for counters in passes[:100]] == [1.0] * 97 + [0.0] * 3
    assert Event.made == made
    for number in range(100, 150):
        timer.begin()
        timer.end()
        timer.count(passes[number])  # the GPU stands still, and no event is taken twice
    Event.reached = Event.stream
    timer.begin()
    timer.end()
    timer.count(passes[150])
    assert [counters.forward_seconds for counters in passes] == [1.0] * 150 + [0.0]


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
