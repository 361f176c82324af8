# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a server counts of its passes: their times on a CPU, and the counters of several engines in sum."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from flexquant.serving.frontend.endpoints import add_up
from flexquant.serving.worker.pass_records import PassClock


def test_a_pass_is_timed_once_and_only_if_it_began() -> None:
    timed: list[tuple[str, float]] = []
    timer: PassClock[str] = PassClock(
        torch.device("cpu"), lambda label, seconds: timed.append((label, seconds))
    )

    def end(label: str) -> None:
        timer.end()
        timer.attribute(label)

    end("never begun")
    timer.begin()
    end("first")
    end("first, asked for its logits again")
    timer.begin()
    timer.begin()
    end("after one without logits")
    assert [label for label, _ in timed] == ["first", "after one without logits"]
    assert all(seconds >= 0 for _, seconds in timed)


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
    timed: list[tuple[int, float]] = []
    timer: PassClock[int] = PassClock(torch.device("cuda"), lambda *told: timed.append(told))
    made = Event.made
    assert Event.stream == made, "an event takes its place on the GPU when it is recorded first"
    for number in range(100):
        timer.begin()
        if number % 3 == 0:
            timer.begin()  # the pass before had no logits
        timer.end()
        timer.attribute(number)
        Event.reached = Event.stream - 3  # the GPU is a pass and a half behind
    assert timed == [(number, 1.0) for number in range(97)]
    assert Event.made == made
    for number in range(100, 150):
        timer.begin()
        timer.end()
        timer.attribute(number)  # the GPU stands still, and no event is taken twice
    Event.reached = Event.stream
    timer.begin()
    timer.end()
    timer.attribute(150)
    assert timed == [(number, 1.0) for number in range(150)]


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
