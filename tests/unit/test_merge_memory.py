# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Merging streams: its memory does not grow with the model."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "merge.py"
MIB = 1 << 20


def merge(mib: int, folder: Path) -> dict:
    argv = [sys.executable, BENCHMARK, "--gib", str(mib / 1024), "--repeats", "1", "--folder", folder]
    printed = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    return json.loads(printed.splitlines()[-1])


def test_four_times_the_model_takes_the_same_memory(tmp_path):
    small, large = (merge(mib, tmp_path) for mib in (128, 512))
    assert large["input_bytes"] - small["input_bytes"] > 300 * MIB
    peaks = [result["peak_rss_above_interpreter_bytes"] for result in (small, large)]
    assert peaks[1] - peaks[0] < 64 * MIB
