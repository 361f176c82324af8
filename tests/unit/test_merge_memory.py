# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Merging streams: its memory does not grow with the model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.merge import in_child, make_sources, merge_once
from tests import programs

MIB = 1 << 20


def merge(mib: int, folder: Path, hidden: int, awq: bool) -> tuple[int, int]:
    """Return the bytes of two checkpoints, and the most memory that merging them took."""
    sources, _ = make_sources(folder, mib / 1024, hidden, awq)
    nbytes = sum(file.stat().st_size for source in sources.values() for file in Path(source).iterdir())
    return nbytes, in_child(merge_once, sources, str(folder / "output"))[1]


@pytest.mark.parametrize(
    ("hidden", "awq"),
    [(2048, False), pytest.param(1024, True, marks=pytest.mark.full)],
    ids=["as it is", "converted"],
)
def test_four_times_the_model_takes_the_same_memory(hidden: int, awq: bool, tmp_path: Path) -> None:
    (small, peak), (large, higher) = (merge(mib, tmp_path / str(mib), hidden, awq) for mib in (64, 256))
    assert large - small > 150 * MIB
    assert higher - peak < 48 * MIB


@pytest.mark.full
def test_the_benchmark_compares_merging_with_copying(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.merge", "--gib", 0.03, "--repeats", 1, "--hidden", 512]
    done = programs.run([*command, "--folder", tmp_path, "--output", tmp_path / "merge.json"], timeout=300)
    found = json.loads((tmp_path / "merge.json").read_text())
    assert found == json.loads(done.stdout.splitlines()[-1])
    (merged,), (copied,) = found["seconds_merge"], found["seconds_cp"]
    assert found["merge_to_cp"] == pytest.approx(merged / copied)
    assert found["verify_to_read"] > 0 and found["peak_rss_above_interpreter_bytes"] > 0
