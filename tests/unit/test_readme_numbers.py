# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The README's numbers are those of the committed results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_readme_is_what_the_results_say():
    command = [sys.executable, str(ROOT / "benchmarks/readme_tables.py"), "--check"]
    assert subprocess.run(command).returncode == 0, "run python benchmarks/readme_tables.py"
