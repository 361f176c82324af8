# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Merging streams: its memory does not grow with the model."""

import json
import sys
from pathlib import Path

from tests import programs

BENCHMARK = programs.ROOT / "benchmarks" / "merge.py"
MIB = 1 << 20


def merge(mib: int, folder: Path) -> dict:
    command = [sys.executable, BENCHMARK, "--gib", mib / 1024, "--repeats", 1, "--folder", folder]
    return json.loads(programs.run(command, timeout=300).stdout.splitlines()[-1])


def test_four_times_the_model_takes_the_same_memory(tmp_path):
    small, large = (merge(mib, tmp_path) for mib in (64, 256))
    assert large["input_bytes"] - small["input_bytes"] > 150 * MIB
    peaks = [result["peak_rss_above_interpreter_bytes"] for result in (small, large)]
    assert peaks[1] - peaks[0] < 48 * MIB
