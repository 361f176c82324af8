# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The trace of passes ends at a whole line where no more can be written, with one warning."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from flexquant.serving.worker.forward_pass import Pass
from flexquant.serving.worker.pass_records import Trace

HEADER = {"policy": "phase"}


def write(path: Path, passes: int) -> list[int]:
    """Write a trace of passes with 1, 2, ... sequences; return the sequences of the passes in the trace."""
    trace = Trace(str(path), 1)
    trace.write(HEADER)
    for number in range(1, passes + 1):
        trace.write({**Pass("decode", number, number, 1, number)._asdict(), "plan": "w4a16"})
    trace.write(HEADER)
    if not path.is_file():
        return []
    header, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert header == HEADER
    return [line["sequences"] for line in lines if "sequences" in line]


def test_all_passes_are_there_while_there_is_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert write(tmp_path / "trace.jsonl", 100) == [*range(1, 101)]
    assert caplog.messages == []


def test_a_full_disk_ends_it(tmp_path: Path, files_of_4_kib: None, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "trace.jsonl"
    told = write(file, 100)
    assert 10 < len(told) < 100 and told == [*range(1, len(told) + 1)]
    assert file.read_bytes().endswith(b"\n")
    reason = "it cannot be written (File too large)"
    assert caplog.messages == [f"the trace '{file}' ends here, and serving goes on: {reason}"]


def test_a_device_that_takes_nothing_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    write(Path("/dev/full"), 3)
    reason = "it cannot be written (No space left on device)"
    assert caplog.messages == [f"the trace '/dev/full' ends here, and serving goes on: {reason}"]


def test_a_file_that_fails_once_more_when_it_is_closed_ends_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "trace.jsonl"
    trace = Trace(str(file), 1)
    trace.write(HEADER)
    assert trace._file is not None
    os.close(trace._file.fileno())
    for _ in range(2):
        trace.write({**Pass("decode", 1, 1, 1, 1)._asdict(), "plan": "w4a16"})
    assert [json.loads(line) for line in file.read_text().splitlines()] == [HEADER]
    reason = "it cannot be written (Bad file descriptor)"
    assert caplog.messages == [f"the trace '{file}' ends here, and serving goes on: {reason}"]


def test_it_ends_at_the_size_that_it_may_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "trace.jsonl"
    told = write(file, 10_000)
    assert told == [*range(1, len(told) + 1)]
    assert (1 << 20) - 300 < file.stat().st_size <= 1 << 20
    reason = "it may have 1 MiB ('flexquant.trace_mib')"
    assert caplog.messages == [f"the trace '{file}' ends here, and serving goes on: {reason}"]
