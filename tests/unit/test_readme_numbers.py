# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The README's numbers are those of the committed results, and it is short enough to be read."""

from __future__ import annotations

import sys

from tests import programs


def test_readme_is_what_the_results_say():
    """If it fails, run python -m benchmarks.readme_tables."""
    programs.run([sys.executable, "-m", "benchmarks.readme_tables", "--check"], timeout=120)


def test_readme_is_not_longer_than_150_lines():
    assert len((programs.ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
