# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Merging streams: its memory does not grow with the model."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "merge.py"
GIB = 1 << 30


def test_merging_2_gib_takes_less_than_1_gib(tmp_path):
    argv = [sys.executable, BENCHMARK, "--gib", "2", "--repeats", "1", "--folder", tmp_path]
    printed = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    result = json.loads(printed.splitlines()[-1])
    assert result["input_bytes"] > 2e9
    assert result["peak_rss_above_interpreter_bytes"] < GIB
