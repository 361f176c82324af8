# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Traces: the built-in ones, files, random ones and those that a client sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.arrivals import BUILTIN, make_builtin
from benchmarks.simulation import find_trace, sent_requests
from flexquant.documents.yaml_document import builtin_names
from flexquant.errors import FlexQuantError
from flexquant.planning.trace import PACKAGE, SUFFIX, Request, read_trace, write_trace


def test_builtin_traces_are_what_the_seed_makes() -> None:
    assert builtin_names(PACKAGE, SUFFIX) == sorted(BUILTIN)
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
        (GOOD.replace("1", "1" + 400 * "0"), ", line 1: arrival is 1000"),
        (GOOD + 100_000 * "[", ", line 2: not valid JSON"),
        (GOOD.replace("2", "0"), ", line 1: input is 0; give tokens, a whole number of at least 1"),
        (GOOD.replace("3", "0"), ", line 1: output is 0"),
        (GOOD.replace("3", "2.5"), ", line 1: output is 2.5"),
        (GOOD + GOOD.replace("1", "0.5"), ", line 2: arrival is 0.5, before the 1 .*; sort the lines"),
        (GOOD.replace("}", ', "a\u2028b": 1}'), ", line 1: a\u2028b is an unknown key"),
        (GOOD.replace("}", ', "a\x85b": 1}') + "[]", ", line 1: a\x85b is an unknown key"),
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


def test_what_a_client_sent_is_what_is_simulated() -> None:
    found = {"start_times": [105.0, 104.5], "input_lens": [7, 9], "output_lens": [2, 3]}
    assert sent_requests(found) == [Request(0, 9, 3), Request(0.5, 7, 2)]


def test_a_random_trace_is_written_like_a_workload() -> None:
    trace = find_trace("30x100+10@2~0.5", burstiness=1)
    assert len(trace) == 30 and trace[-1].arrival == pytest.approx(29 / 2)
    assert all(50 <= r.input <= 150 and 5 <= r.output <= 15 for r in trace)
    assert find_trace("steady", burstiness=1) == make_builtin("steady")
