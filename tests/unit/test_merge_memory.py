# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Merging streams: its memory does not grow with the model."""

import json
import sys
from pathlib import Path

import pytest

from tests import programs

MIB = 1 << 20


def merge(mib: int, folder: Path, *options: object) -> dict:
    command = [sys.executable, "-m", "benchmarks.merge", "--gib", mib / 1024, "--repeats", 1, *options]
    return json.loads(programs.run([*command, "--folder", folder], timeout=300).stdout.splitlines()[-1])


@pytest.mark.parametrize("options", [(), ("--awq", "--hidden", 1024)], ids=["as it is", "converted"])
def test_four_times_the_model_takes_the_same_memory(options, tmp_path):
    small, large = (merge(mib, tmp_path, *options) for mib in (64, 256))
    assert large["input_bytes"] - small["input_bytes"] > 150 * MIB
    peaks = [result["peak_rss_above_interpreter_bytes"] for result in (small, large)]
    assert peaks[1] - peaks[0] < 48 * MIB
