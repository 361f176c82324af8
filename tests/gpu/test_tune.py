# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""`flexquant tune` times engines that are compiled and replay CUDA graphs."""

import subprocess
import sys
from pathlib import Path

import pytest

from flexquant.policy.rules import load_policy

pytestmark = pytest.mark.cuda


def test_a_gpu_is_tuned(checkpoints: Path, tmp_path: Path) -> None:
    output = tmp_path / "tuned.yaml"
    arguments = ["tune", checkpoints / "merged", "--output", output, "--quick", "--max-tokens", "128"]
    command = [sys.executable, "-m", "flexquant", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    measured = load_policy(str(output)).measured
    assert measured is not None
    assert measured.origin["engine_arguments"]["enforce_eager"] is False
    assert measured.origin["machine"]["gpu"] is not None
    assert all(list(curve)[-1] == 128 for curve in measured.decode.values())
