# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The README's numbers are those of the committed results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_readme_is_what_the_results_say():
    command = [sys.executable, "-m", "benchmarks.readme_tables", "--check"]
    assert subprocess.run(command, cwd=ROOT).returncode == 0, "run python -m benchmarks.readme_tables"
