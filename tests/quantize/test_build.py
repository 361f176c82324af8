# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""`flexquant build`: one command from the 16-bit model to the merged checkpoint, whatever interrupts it."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.context
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from flexquant import cli
from flexquant.merge import merge_checkpoints, verify_checkpoint
from tests import programs
from tests.checkpoints import make_checkpoint
from tests.quantize.folders import digests, report

FEW = ["--samples", "4", "--length", "64"]
FLEXQUANT = [sys.executable, "-m", "flexquant"]
SECONDS = 300


@pytest.fixture(scope="module")
def first_build(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return what an undisturbed build leaves, ``merged`` and ``merged-variants``, and what it prints."""
    folder = tmp_path_factory.mktemp("built")
    return folder, run([*FLEXQUANT, "build", str(model), "--output", str(folder / "merged"), *FEW])


@pytest.fixture(scope="module")
def built(first_build: tuple[Path, str]) -> Path:
    return first_build[0]


def test_build_quantises_merges_and_verifies(built: Path) -> None:
    assert sorted(p.name for p in built.iterdir()) == ["merged", "merged-variants"]
    variants = {name: built / "merged-variants" / name for name in ("w8a8", "w4a16")}
    assert set(verify_checkpoint(built / "merged", variants)["tensors_compared_with"]) == set(variants)


def test_a_log_file_gets_one_line_a_stage(
    model: Path, first_build: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, output = first_build
    assert len(output) < 4000 and "\r" not in output
    lines = output.splitlines()
    stages = [line for line in lines if line.startswith("[")]
    assert [line[:6] for line in stages] == [f"[{i}/7] " for i in range(1, 8)]
    assert all(re.search(r" \.\.\. [\d.]+ s$", line) for line in stages)
    # The other lines are a note on the calibration text, and the summary of variants, losses and output.
    assert len(lines) <= 36

    before = digests(folder)
    assert cli.main(["build", str(model), "--output", str(folder / "merged"), *FEW]) == 0
    again = capsys.readouterr().err.splitlines()
    assert [line[:6] for line in again if line.startswith("[")] == [f"[{i}/7] " for i in range(1, 8)]
    assert sum("is finished, and kept" in line for line in again) == 2
    assert digests(folder) == before


# It finds what hides llmcompressor's own lines, which nobody but a developer asks for.
@pytest.mark.full
def test_verbose_shows_what_llmcompressor_prints(model: Path, tmp_path: Path) -> None:
    command = [*FLEXQUANT, "quantize", str(model), "--output", str(tmp_path / "variants"), *FEW]
    output = run([*command, "--variants", "w4a16", "--verbose"])
    assert "Calibrating" in output and "[4/4] w4a16: " in output


def run(command: list[str]) -> str:
    """Return stdout and stderr of a command, in the order in which they were written."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=SECONDS)
    output = done.stdout.decode()
    assert done.returncode == 0, output
    return output


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
    "the first variant is being written": "merged-variants/.w8a8.flexquant-tmp*/config.json",
    "the first variant is finished": "merged-variants/w8a8",
    "the second variant is being written": "merged-variants/.w4a16.flexquant-tmp*/config.json",
    "the second variant is finished": "merged-variants/w4a16",
    "the checkpoint is being written": ".merged.flexquant-tmp*/config.json",
    "the checkpoint is there": "merged",
}
SOME = ["the second variant is being written", "the checkpoint is being written"]


def build(arguments: list[str]) -> None:
    sys.exit(cli.main(arguments))


@pytest.fixture(scope="module")
def processes() -> multiprocessing.context.ForkServerContext:
    """Return a context whose processes are forked from one that has only imported llmcompressor."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flexquant.cli", "llmcompressor", "flexquant.quantization.oneshot"])
    return context


@pytest.mark.parametrize(
    "stages", [pytest.param(SOME, id="some"), pytest.param(list(STAGES), id="every", marks=pytest.mark.full)]
)
def test_killed_at_a_stage_and_started_again_it_ends_in_the_same_bytes(
    stages: list[str],
    model: Path,
    built: Path,
    tmp_path: Path,
    processes: multiprocessing.context.ForkServerContext,
) -> None:
    arguments = ["build", str(model), "--output", str(tmp_path / "merged"), *FEW]
    for stage in stages:
        process = processes.Process(target=build, args=(arguments,))
        process.start()
        deadline = time.monotonic() + SECONDS
        while process.is_alive() and time.monotonic() < deadline and not list(tmp_path.glob(STAGES[stage])):
            time.sleep(0.0005)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, f"it ended before {stage}"
    finished = {p: p.stat().st_mtime_ns for p in (tmp_path / "merged-variants").glob("*/*")}
    programs.run([*FLEXQUANT, *arguments], timeout=SECONDS)
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


def test_an_edited_variant_is_told_and_not_quantised_again(
    model: Path, built: Path, tmp_path: Path, capsys
) -> None:
    shutil.copytree(built, tmp_path / "again")
    edited = tmp_path / "again/merged-variants/w4a16/tokenizer_config.json"
    edited.write_text(edited.read_text() + "\n")
    before = digests(tmp_path / "again")
    assert cli.main(["build", str(model), "--output", str(tmp_path / "again/merged"), *FEW]) == 1
    message = capsys.readouterr().err
    assert "tokenizer_config.json has other content" in message and "--overwrite" in message
    assert digests(tmp_path / "again") == before


def test_a_finished_checkpoint_with_other_files_beside_its_weights_is_told(
    model: Path, built: Path, tmp_path: Path, capsys
) -> None:
    """The variants are gone, so that nothing but the checkpoint remembers the old generation settings."""
    shutil.copytree(model, tmp_path / "tiny")
    shutil.copytree(built / "merged", tmp_path / "merged")
    (tmp_path / "tiny/generation_config.json").write_text('{"do_sample": true, "temperature": 0.5}')
    before = digests(tmp_path / "merged")
    command = ["build", str(tmp_path / "tiny"), "--output", str(tmp_path / "merged"), *FEW]
    assert cli.main(command) == 1
    message = capsys.readouterr().err
    assert "generation_config.json" in message and "--overwrite" in message
    assert digests(tmp_path / "merged") == before


@pytest.mark.parametrize(
    "content",
    ["nothing", "a file of mine", "one variant", "another policy", "a policy of its own", "larger shards"],
)
def test_an_output_that_cannot_be_gone_on_with_is_refused_before_quantising(
    model: Path, built: Path, tmp_path: Path, capsys, content: str
) -> None:
    output, options = tmp_path / "merged", []
    if content == "one variant":
        shutil.copytree(built / "merged-variants/w8a8", output)
    elif content == "another policy":
        shutil.copytree(built / "merged", output)
        options = ["--policy", "w8a8"]
    elif content == "larger shards":
        shutil.copytree(built / "merged", output)
        options = ["--max-shard-size", "100KB"]
    elif content == "a policy of its own":
        merge_checkpoints(
            {n: built / "merged-variants" / n for n in ("w8a8", "w4a16")}, output, policy="w8a8"
        )
    else:
        output.mkdir()
        if content == "a file of mine":
            (output / "thesis.txt").write_text("years of work")
    before = digests(tmp_path)
    assert cli.main(["build", str(model), "--output", str(output), *FEW, *options]) == 1
    message = capsys.readouterr().err
    assert f"{output}" in message and "choose another folder" in message
    assert "calibrating" not in message
    assert digests(tmp_path) == before and not (tmp_path / "merged-variants").exists()


def test_a_policy_that_the_recipe_cannot_serve_is_refused_first(model: Path, tmp_path: Path, capsys) -> None:
    command = ["build", str(model), "--output", str(tmp_path / "merged"), "--recipe", "fp8"]
    assert cli.main([*command, "--policy", "phase"]) == 1
    assert "uses the variant 'w8a8', but the recipe 'fp8' makes fp8, w4a16" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_default_policy_is_one_that_the_recipe_can_serve(model: Path, tmp_path: Path, capsys) -> None:
    modifiers = "{GPTQModifier: {targets: [Linear], ignore: [lm_head], scheme: W8A8}}"
    recipe = f"schema: flexquant.recipe/v1\nvariants: {{a: {modifiers}, b: {modifiers}}}\n"
    (tmp_path / "recipe.yaml").write_text(recipe)
    output = tmp_path / "merged"
    command = ["build", str(model), "--output", str(output), "--recipe", str(tmp_path / "recipe.yaml"), *FEW]
    assert cli.main(command) == 1
    assert "the policy 'phase-batch' uses the variant" in capsys.readouterr().err
    assert not output.exists()


def test_a_finished_checkpoint_has_the_variants_in_the_recipes_order(
    tmp_path: Path, model: Path, capsys
) -> None:
    sources = {name: make_checkpoint(tmp_path / name, scheme=name) for name in ("w4a16", "w8a8")}
    merge_checkpoints(sources, tmp_path / "merged")
    assert cli.main(["build", str(model), "--output", str(tmp_path / "merged"), *FEW]) == 1
    assert "holds the variants w4a16, w8a8, but this build makes w8a8, w4a16" in capsys.readouterr().err


def test_the_fp8_recipe_needs_data_for_w4a16_alone_and_stores_its_policy(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["build", str(model), "--output", str(tmp_path / "merged"), "--recipe", "fp8", *FEW]
    assert cli.main(command) == 0
    assert "fp8: quantising without calibration" in capsys.readouterr().err
    tensors = load_file(tmp_path / "merged-variants/fp8/model.safetensors")
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    assert report(tmp_path / "merged-variants/fp8")["calibration"] is None
    section = json.loads((tmp_path / "merged/config.json").read_text())["quantization_config"]
    assert section["policy"]["rules"][-1] == {"use": "fp8"}
    assert (tmp_path / "merged/recipe.fp8.yaml").is_file()
