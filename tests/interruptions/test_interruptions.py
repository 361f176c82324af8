# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A few interruptions of what needs no llm-compressor; ``python -m tests.interruptions`` makes many."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import programs
from tests.interruptions.commands import COMMANDS
from tests.interruptions.full_disk import OWN_MOUNTS
from tests.interruptions.interrupting import check_left, interrupt_often
from tests.interruptions.started import Started

ENGINES = (pytest.mark.engine, pytest.mark.full)


@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("merge", 10),
        ("merge-over-another", 10),
        pytest.param("eval", 2, marks=ENGINES),
        pytest.param("tune", 2, marks=ENGINES),
    ],
)
def test_killed_it_leaves_nothing_half_done_and_can_run_again(name: str, times: int, tmp_path: Path) -> None:
    assert interrupt_often(COMMANDS[name], tmp_path, times, 0, Started.kill).times == times


@pytest.mark.parametrize(
    "times",
    [
        {"merge": 5, "merge-over-another": 5},
        pytest.param({"eval": 2, "tune": 2}, marks=ENGINES),
    ],
    ids="-".join,
)
def test_on_a_full_disk_as_well(times: dict[str, int], tmp_path: Path) -> None:
    if subprocess.run([*OWN_MOUNTS, "true"], check=False).returncode:
        pytest.skip("this system lets its users mount nothing")
    record = tmp_path / "record.json"
    command = [
        sys.executable,
        "-m",
        "tests.interruptions",
        "--full-disk",
        "--work",
        tmp_path,
        "--record",
        record,
    ]
    programs.run([*OWN_MOUNTS, *command, *(f"{name}={n}" for name, n in times.items())], timeout=1800)
    recorded = json.loads(record.read_text())["full disk"]["commands"]
    assert {name: recorded[name]["finished_by_the_same_command"] for name in times} == times


OLD, NEW = (
    {f"merged/{name}": f"{age} {name}" for name in ("config.json", "weights")} for age in ("old", "new")
)


@pytest.mark.parametrize(
    ("left", "words"),
    [
        ({}, "nothing"),
        (OLD, "merged old"),
        (
            NEW | {".merged.flexquant-tmp/config.json": "half", ".merged.flexquant-tmp/weights": "half"},
            "merged whole, .merged.flexquant-tmp",
        ),
    ],
)
def test_what_may_be_left(left: dict[str, str], words: str) -> None:
    assert check_left(left, OLD, NEW, ()) == words


@pytest.mark.parametrize(
    "left",
    [
        {"merged/config.json": "new config.json"},
        {**NEW, "merged/weights": "old weights"},
        {**NEW, "merged/weights": "half"},
        {**NEW, "merged/more": "new"},
        {**NEW, "merged.new": "half"},
    ],
)
def test_what_must_not_be_left(left: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match="is neither whole nor as it was|is left in sight"):
        check_left(left, OLD, NEW, (".samples.json",))
