# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""benchmarks/calibration.py measures variants of both schemes beside their model, row by row."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest

from benchmarks import calibration

TEXT = "Text that no variant has seen, and that is as good as any other for a random model. " * 20


def test_both_schemes_are_measured(
    model: Path,
    variants: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("prose.txt", "code.txt"):
        (tmp_path / name).write_text(TEXT)
    (tmp_path / "chat.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    output = tmp_path / "result.json"
    named = [f"{scheme}={variants / scheme}" for scheme in ("w4a16", "w8a8")]
    options = ["--rows", "3", "--length", "32", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["calibration.py", str(model), str(tmp_path), *named, *options])
    calibration.main()
    w4a16, w8a8 = json.loads(output.read_text())["variants"]
    assert (w4a16["scheme"], w8a8["scheme"]) == ("w4a16", "w8a8")
    for kind in ("prose", "code", "chat"):
        kl = [statistics.fmean(variant["rows"][kind]["kl"]) for variant in (w4a16, w8a8)]
        assert kl[0] > kl[1] > 0
    table = capsys.readouterr().out
    assert "chat: perplexity" in table and "\n| w8a8 |" in table
