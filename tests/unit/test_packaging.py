# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The wheel holds what the editable install shows: the packages under their import names, and their data."""

from __future__ import annotations

import sys
import zipfile

from tests import programs


def test_wheel_contents(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path)]
    programs.run([*command, programs.ROOT], timeout=300, folder=tmp_path)
    (wheel,) = tmp_path.glob("flexquant-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(n for n in names if n.endswith("entry_points.txt"))
        entry_points = archive.read(metadata).decode()
    for folder, package in (
        ("flexquant", "flexquant"),
        ("merge", "flexquant/merge"),
        ("policies", "flexquant/policies"),
    ):
        kinds = ("*.py", "*.yaml", "*.txt", "*.jsonl", "*.html")
        files = [file for kind in kinds for file in (programs.ROOT / folder).rglob(kind)]
        assert len(files) > 3
        for file in files:
            assert f"{package}/{file.relative_to(programs.ROOT / folder)}" in names
    assert not [n for n in names if n.startswith(("tests", "benchmarks", "examples", "merge/"))]
    assert "[vllm.general_plugins]\nflexquant = flexquant:register" in entry_points
    assert "[console_scripts]\nflexquant = flexquant.cli:main" in entry_points
