# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""`python -m benchmarks prove` in miniature, so that it works the first time that someone has a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from vllm.platforms import current_platform

from benchmarks.proof.outcomes import SKIPPED, read_outcomes
from benchmarks.speed.results import read_cells
from tests.integration.test_examples import newcomers_environment

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not current_platform.is_cpu(), reason="on a GPU a proof takes half an hour")
def test_a_proof_takes_all_steps_and_says_what_was_not_shown(tmp_path: Path) -> None:
    output = tmp_path / "proof"
    command = ["-m", "benchmarks", "prove", "tiny", "--output", str(output), "--work", str(tmp_path / "work")]
    done = subprocess.run(
        [sys.executable, *command, "--minutes", "20", "--commit", "0123456789ab"],
        cwd=ROOT,
        env=newcomers_environment(),
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    outcomes = read_outcomes(output / "tests.jsonl")
    assert outcomes and {outcome["outcome"] for outcome in outcomes.values()} == {SKIPPED}
    assert {o["reason"] for o in outcomes.values()} == {"needs an NVIDIA GPU"}
    cells = read_cells(output)
    assert not [cell["failure"] for cell in cells if "failure" in cell]
    subjects = {cell["parameters"]["subject"] for cell in cells if cell["part"] == "serving"}
    assert subjects == {"w8a8", "w4a16", "flexquant:phase-batch", "flexquant:w8a8"}
    assert [cell for cell in cells if cell["part"] == "kernels"]
    proof = (output / "proof.md").read_text()
    assert proof in done.stdout
    claims = [line for line in proof.splitlines() if line.startswith("| ") and "**" in line]
    assert len(claims) == 10 and all("**not shown**" in claim for claim in claims)
    assert sum("only 1 rounds" in claim for claim in claims) == 6
