# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""`flexquant build`: one command from the 16-bit model to the merged checkpoint, whatever interrupts it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from flexquant import cli
from flexquant.merge import verify_checkpoint
from tests.quantize.folders import digests

FEW = ["--samples", "4", "--length", "64"]
FLEXQUANT = [sys.executable, "-m", "flexquant"]
SECONDS = 300


@pytest.fixture(scope="module")
def built(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an undisturbed build leaves: ``merged`` and ``merged-variants``."""
    folder = tmp_path_factory.mktemp("built")
    assert cli.main(["build", str(model), "--output", str(folder / "merged"), *FEW]) == 0
    return folder


def test_build_quantises_merges_and_verifies(built: Path) -> None:
    assert sorted(p.name for p in built.iterdir()) == ["merged", "merged-variants"]
    variants = {name: built / "merged-variants" / name for name in ("w8a8", "w4a16")}
    assert set(verify_checkpoint(built / "merged", variants)["tensors_compared_with"]) == set(variants)


def test_recipes_and_card_say_how_it_was_made(built: Path, model: Path) -> None:
    card = (built / "merged/README.md").read_text()
    for name in ("w8a8", "w4a16"):
        text = (built / "merged" / f"recipe.{name}.yaml").read_text()
        assert text == (built / "merged-variants" / name / "recipe.yaml").read_text()
        recipe = yaml.safe_load(text)
        assert recipe["calibration"]["samples"] == 4
        for modifier in recipe["variants"][name]:
            assert modifier in card
        assert recipe["made_with"]["llmcompressor"] in card
    assert model.name in card
    assert "4 samples of 64 tokens" in card


STAGES = {
    "the first variant is being written": "merged-variants/.w8a8.tmp-*/config.json",
    "the first variant is finished": "merged-variants/w8a8",
    "the second variant is being written": "merged-variants/.w4a16.tmp-*/config.json",
    "the second variant is finished": "merged-variants/w4a16",
    "the checkpoint is being written": ".merged.tmp-*/config.json",
    "the checkpoint is there": "merged",
}


def test_killed_at_any_stage_and_started_again_it_ends_in_the_same_bytes(
    model: Path, built: Path, tmp_path: Path
) -> None:
    command = [*FLEXQUANT, "build", str(model), "--output", str(tmp_path / "merged"), *FEW]
    for stage, pattern in STAGES.items():
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + SECONDS
        while process.poll() is None and time.monotonic() < deadline and not list(tmp_path.glob(pattern)):
            time.sleep(0.0005)
        process.kill()
        assert process.wait() == -signal.SIGKILL, f"it ended before {stage}"
    finished = {p: p.stat().st_mtime_ns for p in (tmp_path / "merged-variants").glob("*/*")}
    subprocess.run(command, check=True, timeout=SECONDS)
    assert {p: p.stat().st_mtime_ns for p in finished} == finished, "a finished variant was written again"
    assert digests(tmp_path) == digests(built)


def test_a_build_that_differs_needs_overwrite(model: Path, built: Path, tmp_path: Path, capsys) -> None:
    shutil.copytree(built, tmp_path / "again")
    command = ["build", str(model), "--output", str(tmp_path / "again/merged"), *FEW, "--seed", "1"]
    assert cli.main(command) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert digests(tmp_path / "again") == digests(built)
    assert cli.main([*command, "--overwrite"]) == 0
    assert digests(tmp_path / "again") != digests(built)
    verify_checkpoint(tmp_path / "again/merged")


def test_a_policy_that_the_recipe_cannot_serve_is_refused_first(model: Path, tmp_path: Path, capsys) -> None:
    command = ["build", str(model), "--output", str(tmp_path / "merged"), "--recipe", "fp8"]
    assert cli.main([*command, "--policy", "phase"]) == 1
    assert "uses the variant 'w8a8', but the recipe 'fp8' makes fp8, w4a16" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_fp8_recipe_stores_its_policy(model: Path, tmp_path: Path) -> None:
    command = ["build", str(model), "--output", str(tmp_path / "merged"), "--recipe", "fp8", *FEW]
    assert cli.main(command) == 0
    section = json.loads((tmp_path / "merged/config.json").read_text())["quantization_config"]
    assert section["policy"]["rules"][-1] == {"use": "fp8"}
