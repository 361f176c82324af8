# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""`python -m benchmarks prove` in miniature, so that it works the first time that someone has a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from vllm.platforms import current_platform

from benchmarks.proof.outcomes import SKIPPED, read_outcomes
from benchmarks.proof.proving import STEPS
from benchmarks.proof.report import PROOF, read_found
from benchmarks.proof.steps import DONE, read_steps
from benchmarks.speed.results import read_cells
from tests import programs

pytestmark = pytest.mark.engine


@pytest.mark.full
@pytest.mark.skipif(not current_platform.is_cpu(), reason="on a GPU a proof takes half an hour")
def test_a_proof_takes_all_steps_and_says_what_was_not_shown(tmp_path: Path) -> None:
    output = tmp_path / "proof"
    command = [sys.executable, "-m", "benchmarks", "prove", "tiny", "--minutes", "20"]
    command += ["--commit", "0123456789ab", "--output", output, "--work", tmp_path / "work"]
    done = programs.run(command, timeout=1500, environment=programs.newcomers_environment())
    outcomes = read_outcomes(output / "tests.jsonl")
    assert outcomes and {outcome["outcome"] for outcome in outcomes.values()} == {SKIPPED}
    assert {o["reason"] for o in outcomes.values()} == {"needs an NVIDIA GPU"}
    cells = read_cells(output)
    assert not [cell["failure"] for cell in cells if "failure" in cell]
    subjects = {cell["parameters"]["subject"] for cell in cells if cell["part"] == "serving"}
    assert subjects == {"w8a8", "w8a8:again", "flexquant:phase-batch"}
    assert [cell for cell in cells if cell["part"] == "kernels"]
    steps = read_steps(output)
    assert [step.name for step in STEPS] == list(steps)
    assert {step["state"] for step in steps.values()} == {DONE}
    proof = (output / PROOF).read_text()
    assert proof in done.stdout
    assert "\n! kernel     w4a16: " in proof or "\n  kernel     w4a16: " in proof
    claims = [line for line in proof.splitlines() if line.startswith("| ") and "**" in line]
    assert claims and all("**not shown**" in claim for claim in claims)
    found = read_found(output)
    assert {runner: list(prompts) for runner, prompts in found.first_tokens.items()} == {
        runner: ["12 tokens"] for runner in ("V2", "V1")
    }
    assert {len(rounds) for policies in found.live.values() for rounds in policies.values()} == {1}
    measured = [claim for claim in claims if "not measured" not in claim and "not run" not in claim]
    assert sum("too few rounds" in claim for claim in measured) == 10
    again = programs.run(command, timeout=300, environment=programs.newcomers_environment())
    assert "== " not in again.stdout, "everything is done already"
