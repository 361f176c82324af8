# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The lines of a long command's stages, in a file and on a terminal."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from flexquant.cli import _stages
from flexquant.cli._stages import Stages


def two_stages() -> None:
    stages = Stages(2)
    with stages.stage("reading") as show:
        for done in range(1, 4):
            show(done, 3)
    with pytest.raises(ValueError), stages.stage("w8a8: quantising", unit=" layers") as show:
        show(12, 30)
        stages.note("3 linears were rounded to nearest")
        raise ValueError


def test_a_file_gets_one_line_a_stage_and_a_line_for_each_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "log").open("w") as log:
        monkeypatch.setattr(sys, "stderr", log)
        two_stages()
        monkeypatch.undo()
    first, second, third = (tmp_path / "log").read_text().splitlines()
    assert re.fullmatch(r"\[1/2\] reading \.\.\. \d+\.\d s", first)
    assert second == "[2/2] w8a8: quantising ..."
    assert third == "3 linears were rounded to nearest"


def read_all(terminal: int) -> str:
    """Return what was written to a terminal whose other end is closed, and close this one."""
    written = b""
    with suppress(OSError):  # reading fails at the terminal's end
        while part := os.read(terminal, 10000):
            written += part
    os.close(terminal)
    return written.decode()


def test_a_terminal_sees_the_running_line_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_stages, "SHOWN_EVERY", 0)
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        two_stages()
        monkeypatch.undo()
    written = read_all(master)
    assert "\r[1/2] reading ... 67%, 0 s" in written
    assert "\r[2/2] w8a8: quantising ... 12 of 30 layers, 0 s" in written
    lines = written.replace("\x1b[K", "").split("\n")
    first, second, third = (line.rstrip("\r").rpartition("\r")[2] for line in lines[:3])
    assert re.fullmatch(r"\[1/2\] reading \.\.\. \d+\.\d s", first)
    assert second == "[2/2] w8a8: quantising ... 12 of 30 layers, 0 s"
    assert third == "3 linears were rounded to nearest"
