# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What the speed benchmark says where servers had too little memory."""

from __future__ import annotations

from pathlib import Path

from benchmarks.speed.pressure import STALLED, short_of_memory, stalled_seconds

TOLD = """some avg10=0.14 avg60=25.67 avg300=39.13 total=249795381
full avg10=0.10 avg60=19.99 avg300=30.56 total=186911466
"""


def test_the_time_that_all_programs_waited(tmp_path: Path) -> None:
    (tmp_path / "memory").write_text(TOLD)
    assert stalled_seconds(tmp_path / "memory") == 186.911466
    assert stalled_seconds(tmp_path / "missing") == 0
    assert stalled_seconds() >= 0


def test_measurements_that_were_disturbed_are_counted() -> None:
    calm = {"duration": 2.0, STALLED: 0.01}
    assert short_of_memory([calm, {"duration": 2.0}]) == ""
    told = short_of_memory([calm, {"duration": 2.0, STALLED: 0.3}])
    assert told.startswith("In 1 of 2 measurements") and "fewer subjects" in told
