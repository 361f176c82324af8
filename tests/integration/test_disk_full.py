# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""``flexquant eval`` and ``tune`` where the disk is full when they write what they found.

The file that they write beside the final one leads to ``/dev/full``, which takes no byte.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import programs
from tests.interruptions.commands import COMMANDS

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("name", "written", "advice"),
    [
        ("eval", "results/quality.json", "the numbers are kept in"),
        pytest.param("tune", "policy.yaml", "free some space", marks=pytest.mark.full),
    ],
)
def test_what_was_there_stays_and_the_next_run_succeeds(
    name: str, written: str, advice: str, tmp_path: Path
) -> None:
    command, inputs, output = COMMANDS[name], tmp_path / "inputs", tmp_path / "output"
    inputs.mkdir()
    command.make_inputs(inputs)
    file = output / written
    file.parent.mkdir(parents=True)
    file.write_text("old")
    (full := file.with_name(f".{file.name}.flexquant-new")).symlink_to("/dev/full")
    run = [sys.executable, "-m", "flexquant", *command.arguments(inputs, output)]

    environment = programs.newcomers_environment() | {"TMPDIR": str(tmp_path)}
    refused = programs.run(run, timeout=600, status=1, environment=environment)
    sentence = next(line for line in refused.stderr.splitlines() if line.startswith("flexquant"))
    assert "No space left on device" in sentence and advice in sentence
    assert "Traceback" not in refused.stderr
    assert file.read_text() == "old"
    assert not full.is_symlink()

    programs.run(run, timeout=600, environment=environment)
    assert file.read_text() != "old"
