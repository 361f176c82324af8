# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a server writes down of its passes: times, sums over engines, a trace that ends at a whole line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import ClassVar

import torch
from vllm.config import ParallelConfig, VllmConfig

from flexquant.serving.frontend.endpoints import add_up
from flexquant.serving.worker.forward_pass import Pass
from flexquant.serving.worker.pass_records import PassClock, PassRecords, PlanCounters, Trace
from tests.programs import small_files


def test_a_pass_is_timed_once_and_only_if_it_began():
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


def run_pass(timer: PassClock, counters: PlanCounters) -> None:
    timer.begin()
    timer.end()
    timer.count(counters)


def test_on_a_gpu_events_are_made_before_the_passes_and_read_once_they_have_passed(monkeypatch):
    monkeypatch.setattr(torch, "Event", Event)
    timer, passes = PassClock(torch.device("cuda")), [PlanCounters() for _ in range(151)]
    made = Event.made
    assert Event.stream == made, "an event takes its place on the GPU when it is recorded first"
    for number in range(100):
        if number % 3 == 0:
            timer.begin()  # the pass before had no logits
        run_pass(timer, passes[number])
        Event.reached = Event.stream - 3  # the GPU is a pass and a half behind
    assert [counters.forward_seconds for counters in passes[:100]] == [1.0] * 97 + [0.0] * 3
    assert Event.made == made
    for number in range(100, 150):
        run_pass(timer, passes[number])  # the GPU stands still, and no event is taken twice
    Event.reached = Event.stream
    run_pass(timer, passes[150])
    assert [counters.forward_seconds for counters in passes] == [1.0] * 150 + [0.0]


def test_counters_of_engines_are_added_by_plan_and_phase():
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


def test_of_an_engines_ranks_the_first_that_computes_logits_tells():
    """Of two pipeline stages of two ranks; a pass has no end on the first stage."""
    parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    config, telling = VllmConfig(parallel_config=parallel), []
    for config.parallel_config.rank in range(4):
        if PassRecords(config).counted() is not None:
            telling.append(config.parallel_config.rank)
    assert telling == [2]


HEADER = {"policy": "phase"}


def record(number: int) -> dict[str, object]:
    """Return what a trace has of a decode pass with this number of sequences."""
    return {**Pass("decode", number, number, 1, number)._asdict(), "plan": "w4a16"}


def write(path: Path, passes: int) -> list[int]:
    """Write a trace of passes with 1, 2, ... sequences; return the sequences of the passes in the trace."""
    trace = Trace(str(path), 1)
    trace.write(HEADER)
    for number in range(1, passes + 1):
        trace.write(record(number))
    trace.write(HEADER)
    if not path.is_file():
        return []
    header, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert header == HEADER
    return [line["sequences"] for line in lines if "sequences" in line]


def ends(file: Path, reason: str) -> list[str]:
    """Return the only message that the end of a trace leaves."""
    return [f"the trace '{file}' ends here, and serving goes on: {reason}"]


def test_all_passes_are_there_while_there_is_room_and_take_the_place_of_an_earlier_trace(tmp_path, caplog):
    assert write(tmp_path / "trace.jsonl", 100) == [*range(1, 101)] and caplog.messages == []
    file = tmp_path / "trace.jsonl"
    assert write(file, 3) == [1, 2, 3]
    before = file.read_bytes()
    Trace(str(file), 1)  # as by a start that does not get as far as serving
    assert file.read_bytes() == before and write(file, 2) == [1, 2]


def test_a_full_disk_ends_it(tmp_path, caplog):
    file = tmp_path / "trace.jsonl"
    with small_files(4096):
        told = write(file, 100)
    assert 10 < len(told) < 100 and told == [*range(1, len(told) + 1)]
    assert file.read_bytes().endswith(b"\n")
    assert caplog.messages == ends(file, "it cannot be written (File too large)")


def test_a_device_that_takes_nothing_ends_it(caplog):
    write(Path("/dev/full"), 3)
    assert caplog.messages == ends(Path("/dev/full"), "it cannot be written (No space left on device)")


def test_a_file_that_fails_once_more_when_it_is_closed_ends_it(tmp_path, caplog):
    file = tmp_path / "trace.jsonl"
    trace = Trace(str(file), 1)
    trace.write(HEADER)
    assert trace._file is not None
    os.close(trace._file.fileno())
    for _ in range(2):
        trace.write(record(1))
    assert [json.loads(line) for line in file.read_text().splitlines()] == [HEADER]
    assert caplog.messages == ends(file, "it cannot be written (Bad file descriptor)")


def test_it_ends_at_the_size_that_it_may_have(tmp_path, caplog):
    file = tmp_path / "trace.jsonl"
    told = write(file, 10_000)
    assert told == [*range(1, len(told) + 1)] and (1 << 20) - 300 < file.stat().st_size <= 1 << 20
    assert caplog.messages == ends(file, "it may have 1 MiB ('flexquant.trace_mib')")
