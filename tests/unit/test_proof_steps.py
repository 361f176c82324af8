# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The steps of a proof: what fits into the GPU, their time, and that what was found is not lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.proof.gpu import (
    SERVING,
    fitting,
    fitting_subjects,
    kv_cache_gib,
    most_tokens,
    server_gib,
)
from benchmarks.proof.live import BYTES_A_WEIGHT, CANDIDATES, WORKLOADS
from benchmarks.proof.outcomes import FAILED, NOT_RUN, PASSED, VARIABLE, read_outcomes
from benchmarks.proof.proving import STEPS
from benchmarks.proof.report import PROOF, write_proof
from benchmarks.proof.steps import DONE, OUT_OF_TIME, Outcome, append_step, read_steps, run_bounded
from benchmarks.speed.results import Results
from benchmarks.speed.shapes import SHAPES

ROOT = Path(__file__).parents[2]


def test_the_kv_cache_holds_the_largest_workload() -> None:
    shape = SHAPES["llama-3.1-8b"]
    tokens = kv_cache_gib(shape, most_tokens(SERVING)) * 2**30 / shape.kv_bytes_per_token
    assert tokens == pytest.approx(1.1 * 24 * (512 + 64) * 1.5, rel=0.01)


@pytest.mark.parametrize(
    ("free", "first"),
    [
        (139, "qwen2.5-32b"),
        (78, "qwen2.5-32b"),
        (47, "qwen2.5-32b-32layers"),
        (23, "llama-3.1-8b"),
        (1, None),
    ],
)
def test_the_next_smaller_shape_is_taken_where_memory_ends(free: float, first: str | None) -> None:
    tokens = max(workload.most_at_once * workload.longest for workload in WORKLOADS)
    assert next(iter(fitting(CANDIDATES, free, BYTES_A_WEIGHT, tokens)), None) == first


def test_servers_side_by_side_are_as_many_as_fit_with_two_of_each_static_checkpoint() -> None:
    shape = SHAPES["llama-3.1-8b"]
    cache = kv_cache_gib(shape, most_tokens(SERVING))
    on_80_gb, on_24_gb = (fitting_subjects(shape, cache, free) for free in (78, 23))
    assert on_80_gb[:5] == ["w8a8", "w4a16", "flexquant:phase-batch", "w8a8:again", "w4a16:again"]
    assert on_24_gb == ["w8a8"]
    assert server_gib(shape, 1.0, cache) > 6.5 + cache  # 8-bit weights of 7 billion linear parameters


def test_the_first_steps_take_ten_minutes_and_all_take_thirty() -> None:
    assert sum(step.seconds for step in STEPS[:5]) <= 600
    assert sum(step.seconds for step in STEPS) <= 1800
    assert len({step.name for step in STEPS}) == len(STEPS)


def test_steps_are_written_as_they_end_and_commands_end_in_their_time(tmp_path: Path) -> None:
    began = time.monotonic()
    slow = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
    log = tmp_path / "log.txt"
    assert run_bounded(slow, 2, os.environ, log).state == OUT_OF_TIME
    assert time.monotonic() - began < 60
    failed = run_bounded([sys.executable, "-c", "print(1); print(2); exit(3)"], 60, os.environ, log)
    assert failed.note == "ended with 3, log.txt ends: 2"
    append_step(tmp_path, "one", failed, 1.25, {"commit": "a"})
    append_step(tmp_path, "one", Outcome(DONE), 2, {"commit": "a"})
    with open(tmp_path / "steps.jsonl", "a") as file:
        file.write('{"step": "two", "st')
    assert read_steps(tmp_path) == {"one": {"state": DONE, "note": "", "seconds": 2, "commit": "a"}}


def test_a_report_is_there_before_anything_is_known_and_while_steps_are_under_way(tmp_path: Path) -> None:
    folder = tmp_path / "proof"
    Results(folder, "tiny", "0123456789ab")
    (folder / "policies.json").write_text('{"cells": {"2x16+4": {"w8a8')  # ended while it wrote
    text = write_proof(folder, {step.name: step.seconds for step in STEPS}).read_text()
    assert text.count("**not shown**") == text.count("**") // 2 > 20
    assert text.count("| not begun |") == len(STEPS)
    assert [file.name for file in folder.iterdir() if file.name.startswith(PROOF[:5])] == [PROOF]


WRITTEN = """
import time
def test_good(): pass
def test_bad(): assert 1 == 2
def test_slow(): time.sleep(600)
"""


def test_outcomes_are_there_when_a_run_is_stopped_and_what_passed_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(WRITTEN)
    file = tmp_path / "tests.jsonl"

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "pytest", "-p", "benchmarks.proof.outcomes", "--rootdir", ".", "."]
        environment = {**os.environ, VARIABLE: str(file), "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            [*command, *arguments], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL
        )

    with start() as process:
        for _ in range(600):
            if [o["outcome"] for o in read_outcomes(file).values()].count(NOT_RUN) == 1:
                break
            time.sleep(0.1)
        process.kill()
    found = read_outcomes(file)
    assert {test: o["outcome"] for test, o in found.items()} == {
        "test_it.py::test_good": PASSED,
        "test_it.py::test_bad": FAILED,
        "test_it.py::test_slow": NOT_RUN,
    }
    assert "assert 1 == 2" in found["test_it.py::test_bad"]["reason"]
    with start("-k", "not slow") as process:
        assert process.wait(60) == 1
    lines = file.read_text().splitlines()
    ran = [line for line in lines if NOT_RUN not in line]
    assert len(lines) - len(ran) == 3
    assert [line.count("test_bad") > 0 for line in ran] == [False, True, True]


def test_a_line_cut_off_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "tests.jsonl"
    file.write_text('{"test": "a", "outcome": "passed", "seconds": 1}\n{"test": "b", "ou')
    assert list(read_outcomes(file)) == ["a"]
    assert read_outcomes(tmp_path / "none.jsonl") == {}
