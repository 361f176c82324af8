# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""``flexquant eval`` and ``tune`` where the disk is full when they write what they found.

The file that they write beside the final one leads to ``/dev/full``, which takes no byte.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flexquant.merge import merge_checkpoints
from tests import programs
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("command", "output", "written", "advice"),
    [
        (
            "eval --policies phase --batch-sizes 2 --samples 2 --prompt-tokens 16 --tokens 8",
            "results",
            "results/quality.json",
            "the numbers are kept in",
        ),
        pytest.param(
            "tune --quick --rounds 1 --max-rounds 1 --max-batch 4 --max-tokens 64 --overwrite",
            "policy.yaml",
            "policy.yaml",
            "free some space",
            marks=pytest.mark.full,
        ),
    ],
)
@pytest.mark.full
def test_what_was_there_stays_and_the_next_run_succeeds(
    command: str, output: str, written: str, advice: str, tmp_path: Path
) -> None:
    sources = {s: make_checkpoint(tmp_path / s, scheme=s) for s in ("w8a8", "w4a16")}
    merge_checkpoints(sources, tmp_path / "merged")
    name, *options = command.split()
    if name == "eval":
        (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
        options += ["--text", str(tmp_path / "text.txt")]
    file = tmp_path / "output" / written
    file.parent.mkdir(parents=True)
    file.write_text("old")
    (full := file.with_name(f".{file.name}.flexquant-new")).symlink_to("/dev/full")
    run = [sys.executable, "-m", "flexquant", name, str(tmp_path / "merged"), *options]
    run += ["--output", str(tmp_path / "output" / output)]

    environment = programs.newcomers_environment() | {"TMPDIR": str(tmp_path)}
    refused = programs.run(run, timeout=600, status=1, environment=environment)
    sentence = next(line for line in refused.stderr.splitlines() if line.startswith("flexquant"))
    assert "No space left on device" in sentence and advice in sentence
    assert "Traceback" not in refused.stderr
    assert file.read_text() == "old"
    assert not full.is_symlink()

    programs.run(run, timeout=600, environment=environment)
    assert file.read_text() != "old"
