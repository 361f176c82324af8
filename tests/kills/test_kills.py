# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A few kills of each command that needs no llm-compressor; ``python -m tests.kills`` makes many."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kills.commands import COMMANDS
from tests.kills.killing import check_left, kill_often

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
    assert kill_often(COMMANDS[name], tmp_path, times, seed=0).kills == times


OLD, NEW = (
    {f"merged/{name}": f"{age} {name}" for name in ("config.json", "weights")} for age in ("old", "new")
)


@pytest.mark.parametrize(
    ("left", "words"),
    [
        ({}, "nothing"),
        (OLD, "merged old"),
        (
            NEW | {".merged.tmp/config.json": "half", ".merged.tmp/weights": "half"},
            "merged whole, .merged.tmp",
        ),
    ],
)
def test_what_a_kill_may_leave(left: dict[str, str], words: str) -> None:
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
def test_what_a_kill_must_not_leave(left: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match="is neither whole nor as it was|is left in sight"):
        check_left(left, OLD, NEW, (".samples.json",))
