# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Measured times of passes: read, interpolated, shown; the names of devices, the marks of findings."""

import os
from math import inf, nan, sqrt
from typing import Any

import pytest
from pydantic import ValidationError

from examples.vllm_server import default_environment
from flexquant.doctor import Finding
from flexquant.evaluation.engine import describe_command, describe_machine, prepare_environment
from flexquant.policy.pass_times import PassTimes, device_name, format_times

DOCUMENT: dict[str, Any] = {
    "origin": {"machine": "one"},
    "context": 512,
    "decode_ms": {
        "w8a8": {"4": [40, 39, 42], "1": [20, 20, 20]},
        "w4a16": {"1": [10.0, 9.5, 11], "4": [30, 30, 30]},
    },
    "prefill_ms": {"w8a8": {"512": [100, 99, 101]}, "w4a16": {"512": [300, 299, 301]}},
}
TIMES = PassTimes.model_validate(DOCUMENT)


def test_times_are_in_seconds_and_go_back_as_they_were_also_of_some_variants_alone() -> None:
    assert TIMES.decode["w8a8"] == {1: (0.02, 0.02, 0.02), 4: (0.04, 0.039, 0.042)}
    assert list(TIMES.decode["w8a8"]) == [1, 4] and TIMES.to_data() == DOCUMENT
    alone = TIMES.only(["w4a16"])
    assert alone.variants == ("w4a16",)
    assert alone.decode == {"w4a16": TIMES.decode["w4a16"]}
    assert alone.prefill == {"w4a16": TIMES.prefill["w4a16"]}


def test_a_pass_between_and_beyond_the_sizes() -> None:
    """By the logarithms; a curve of one size is proportional; layers share a pass evenly."""
    in_int8, mixed = ("w8a8", "w8a8"), ("w8a8", "w4a16")
    for size, expected in ((1, 0.02), (2, 0.02 * sqrt(2)), (4, 0.04), (16, 0.08)):
        assert TIMES.seconds(in_int8, "decode", size) == pytest.approx(expected)
    assert TIMES.seconds(mixed, "decode", 4) == pytest.approx(0.035)
    assert TIMES.seconds(in_int8, "prefill", 256) == pytest.approx(0.05)
    assert TIMES.seconds(mixed, "mixed", 512) == pytest.approx(0.2)


def test_the_table() -> None:
    assert [line.split() for line in format_times(TIMES, lambda phase, size: f"{phase[0]}{size}")] == [
        ["decode,", "ms", "w8a8", "w4a16", "plan"],
        ["1", "sequence", "20", "10", "(9.5-11)", "d1"],
        ["4", "sequences", "40", "(39-42)", "30", "d4"],
        [],
        ["prefill,", "ms", "w8a8", "w4a16", "plan"],
        ["512", "tokens", "100", "(99-101)", "300", "(299-301)", "p512"],
    ]


def test_the_table_has_the_sizes_at_which_all_were_measured() -> None:
    decode = {"w8a8": {"1": [20, 20, 20], "4": [40, 40, 40]}, "w4a16": {"4": [30, 30, 30], "8": [60, 60, 60]}}
    lines = format_times(PassTimes.model_validate(DOCUMENT | {"decode_ms": decode}), lambda *_: "")
    assert [line.split()[0] for line in lines if line] == ["decode,", "4", "prefill,", "512"]


@pytest.mark.parametrize("value", [inf, -inf, nan])
def test_an_origin_that_json_has_not_is_refused(value: float) -> None:
    with pytest.raises(ValidationError, match="give a mapping, without .inf and .nan"):
        PassTimes.model_validate(DOCUMENT | {"origin": {"a": [value]}})


@pytest.mark.parametrize(
    ("times", "problem"),
    [
        *(
            ({key: [1, 1, 1]}, "is not a size; give whole numbers of at least 1 as keys")
            for key in ("0", "many", "01", "\u0661")
        ),
        ({"1": [1, 0, 2]}, r"is \[1.0, 0.0, 2.0\]; give times above 0 with low <= median <= high"),
        ({"1": [3, 1, 2]}, "give times above 0 with low <= median <= high"),
    ],
)
def test_what_is_no_time_is_refused(times: dict[str, list[float]], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        PassTimes.model_validate(DOCUMENT | {"decode_ms": {"w8a8": times, "w4a16": times}})


@pytest.mark.parametrize(
    ("origin", "name"),
    [
        ({"machine": {"cpu": "C", "cores": 2, "gpu": "NVIDIA L4"}}, "NVIDIA L4"),
        ({"machine": {"cpu": "C", "cores": 2, "gpu": None}}, "C, 2 cores"),
        ({"machine": "my laptop"}, "my laptop"),
        ({}, "an unknown machine"),
    ],
)
def test_devices_are_named(origin: dict[str, Any], name: str) -> None:
    assert device_name(origin) == name


def test_this_machine_has_a_name() -> None:
    machine = describe_machine()
    assert device_name({"machine": machine}).startswith(machine["gpu"] or machine["cpu"])


def test_a_command_tells_nothing_of_where_its_files_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["/opt/bin/flexquant", "eval", "/home/anna/secret/merged", "--text", "a/b"]
    monkeypatch.setattr("sys.argv", command)
    assert describe_command() == ["flexquant", "eval", "merged", "--text", "a/b"]


def test_a_server_takes_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert default_environment()["VLLM_CPU_KVCACHE_SPACE"] == "1"
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    assert default_environment()["VLLM_CPU_KVCACHE_SPACE"] == "7"
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "7")
    prepare_environment()
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == os.environ["VLLM_CPU_KVCACHE_SPACE"] == "7"


def test_a_mark_tells_what_could_be_better_from_what_does_not_serve() -> None:
    marks = {level: Finding(level, "memory", "text").line() for level in ("ok", "note", "problem")}
    assert marks == {"ok": "  memory     text", "note": "! memory     text", "problem": "X memory     text"}
