# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a proof says of its claims, from outcomes and cells; and that no outcome is lost or asked twice."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.proof.claims import CONTRADICTED, NOT_SHOWN, SHOWN, TESTED, Verdict, judge
from benchmarks.proof.outcomes import FAILED, PASSED, SKIPPED, VARIABLE, Outcomes, read_outcomes
from benchmarks.proof.proving import OVERHEAD, SERVING, kv_cache_gib
from benchmarks.speed.shapes import SHAPES
from flexquant.measuring.comparison import compare

ROOT = Path(__file__).parents[2]
ALONE, BATCH, _ = SERVING
GRAPHS = TESTED["test_graph_modes.py"]
ONE, OTHER = "tests/gpu/test_graph_modes.py::test_a", "tests/gpu/test_graph_modes.py::test_b"


def verdict(claim: str, outcomes: Outcomes | None = None, unfinished: Any = (), cells: Any = ()) -> Verdict:
    (found,) = [v for v in judge(outcomes or {}, unfinished, cells) if claim in v.claim]
    return found


@pytest.mark.parametrize(
    ("outcomes", "unfinished", "expected"),
    [
        ([], [], NOT_SHOWN),
        ([PASSED, PASSED], [], SHOWN),
        ([PASSED, SKIPPED], [], SHOWN),
        ([SKIPPED, SKIPPED], [], NOT_SHOWN),
        ([PASSED], [OTHER], NOT_SHOWN),
        ([FAILED], [OTHER], CONTRADICTED),
        ([PASSED, PASSED], ["tests/gpu/test_tune.py::test_c"], SHOWN),
    ],
)
def test_a_claim_of_tests_is_shown_by_all_and_contradicted_by_one(
    outcomes: list[str], unfinished: list[str], expected: str
) -> None:
    found = {test: {"outcome": outcome} for test, outcome in zip((ONE, OTHER), outcomes, strict=False)}
    assert verdict(GRAPHS, found, unfinished).verdict == expected
    assert verdict(TESTED["test_tune.py"], found, unfinished).verdict == NOT_SHOWN


def cells(part: str, workload: Any, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return cells in which all of a subject's times, ms, are the round's, and its rate is the inverse."""
    return [
        {
            "part": part,
            "parameters": {"workload": workload.describe(), "subject": subject, "round": number},
            "result": {
                "ttfts": [time / 1000],
                "tpots": [time / 1000],
                "median_ttft_ms": time,
                "median_tpot_ms": time,
                "output_throughput": 1000 / time,
            },
        }
        for subject, rounds in times.items()
        for number, time in enumerate(rounds)
    ]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([1.0, 1.01, 1.02, 0.99, 1.0, 1.02], SHOWN),
        ([1.0, 1.01, 1.2, 0.99, 1.0, 1.02], NOT_SHOWN),
        ([1.1, 1.2, 1.1, 1.05, 1.3, 1.04], CONTRADICTED),
        ([1.0, 1.0, 1.0, 1.0], NOT_SHOWN),
    ],
)
def test_equality_is_shown_within_three_percent_by_five_rounds(times: list[float], expected: str) -> None:
    static = [1.0] * len(times)
    overhead = cells("overhead", OVERHEAD[0], {"w8a8": static, "flexquant:w8a8": times})
    assert verdict("nothing over stock vLLM: time per token", cells=overhead).verdict == expected
    decode = cells("serving", ALONE, {"w4a16": static, "flexquant:phase-batch": times})
    assert verdict("at the pace of static W4A16", cells=decode).verdict == expected
    assert verdict("at the pace of static W4A16", cells=overhead).evidence == "not measured"
    words = compare(times).words()
    assert verdict("at the pace of static W4A16", cells=decode).evidence.endswith(f"), {words}")
    prefill = cells("serving", BATCH, {"w8a8": static, "flexquant:phase-batch": times})
    assert verdict("has its first tokens", cells=prefill).verdict == expected


@pytest.mark.parametrize(("milliseconds", "expected"), [(0.9, SHOWN), (1.0, NOT_SHOWN), (1.1, CONTRADICTED)])
def test_a_higher_rate_is_shown_beyond_the_interval(milliseconds: float, expected: str) -> None:
    both = cells("serving", BATCH, {"w8a8": [1.0] * 6, "flexquant:phase-batch": [milliseconds] * 6})
    assert verdict("more tokens a second than under static W8A8", cells=both).verdict == expected


@pytest.mark.parametrize(("milliseconds", "expected"), [(0.9, SHOWN), (1.0, NOT_SHOWN), (1.1, CONTRADICTED)])
def test_less_time_is_shown_below_the_interval(milliseconds: float, expected: str) -> None:
    both = cells("serving", BATCH, {"w4a16": [1.0] * 6, "flexquant:one-copy": [milliseconds] * 6})
    assert verdict("prefills a batch sooner than static W4A16", cells=both).verdict == expected


def test_the_kv_cache_holds_the_largest_workload() -> None:
    shape = SHAPES["llama-3.1-8b"]
    tokens = kv_cache_gib(shape, SERVING) * 2**30 / shape.kv_bytes_per_token
    assert tokens == pytest.approx(1.1 * 32 * (512 + 64) * 1.5, rel=0.01)


TESTS = """
import time
def test_good(): pass
def test_bad(): assert 1 == 2
def test_slow(): time.sleep(600)
"""


def test_outcomes_are_there_when_a_run_is_stopped_and_what_passed_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    file = tmp_path / "tests.jsonl"

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "pytest", "-p", "benchmarks.proof.outcomes", "--rootdir", ".", "."]
        environment = {**os.environ, VARIABLE: str(file), "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            [*command, *arguments], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL
        )

    with start() as process:
        for _ in range(600):
            if len(read_outcomes(file)) == 2:
                break
            time.sleep(0.1)
        process.kill()
    found = read_outcomes(file)
    assert {test: o["outcome"] for test, o in found.items()} == {
        "test_it.py::test_good": PASSED,
        "test_it.py::test_bad": FAILED,
    }
    assert "assert 1 == 2" in found["test_it.py::test_bad"]["reason"]
    with start("-k", "not slow") as process:
        assert process.wait(60) == 1
    lines = file.read_text().splitlines()
    assert [line.count("test_bad") > 0 for line in lines] == [False, True, True]


def test_a_line_cut_off_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "tests.jsonl").write_text(
        '{"test": "a", "outcome": "passed", "seconds": 1}\n{"test": "b", "ou'
    )
    assert list(read_outcomes(tmp_path / "tests.jsonl")) == ["a"]
    assert read_outcomes(tmp_path / "none.jsonl") == {}
