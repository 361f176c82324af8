# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""`flexquant build` and `flexquant quantize`: what they print and leave, whatever interrupts them."""

import json
import multiprocessing
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from flexquant import cli
from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
from flexquant.merge import merge_checkpoints, verify_checkpoint
from tests import readme
from tests.kills import kill_often
from tests.policies import rules
from tests.quantize.quantizing import OPTIONS, digests, report, section

SECONDS = 300
SCHEMES = ("w8a8", "w4a16")


def command(name: str, model: Path, output: Path, *more: str) -> list[str]:
    """Return the arguments of ``flexquant build`` or ``quantize`` with few samples."""
    return [name, str(model), "--output", str(output), *OPTIONS, *more]


@pytest.fixture(scope="module")
def first_build(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return what an undisturbed build leaves, ``merged`` and ``merged-variants``, and what it prints."""
    folder = tmp_path_factory.mktemp("built")
    return folder, run(command("build", model, folder / "merged"))


@pytest.fixture(scope="module")
def built(first_build: tuple[Path, str]) -> Path:
    return first_build[0]


def test_build_quantises_merges_and_verifies(built: Path) -> None:
    assert sorted(p.name for p in built.iterdir()) == ["merged", "merged-variants"]
    variants = {name: built / "merged-variants" / name for name in SCHEMES}
    assert set(verify_checkpoint(built / "merged", variants)["tensors_compared_with"]) == set(variants)


def test_nested_it_is_smaller_and_its_loss_is_measured(model, built, tmp_path, capsys):
    others = shutil.ignore_patterns("w8a8")
    shutil.copytree(built / "merged-variants", tmp_path / "merged-variants", ignore=others)
    nested = command("build", model, tmp_path / "merged", "--max-loss", "0.001", "--nested", "--json")
    nested[-2:-2] = ["--max-shard-size", "100KB"]
    assert cli.main(nested) == 0
    said = capsys.readouterr()
    result = json.loads(said.out.splitlines()[-1])
    assert said.err.startswith("--nested takes the recipe 'unrotated': rotated weights cannot be nested\n")
    assert [variant["kept"] for variant in result["variants"].values()] == [False, True]
    assert not section(tmp_path / "merged-variants/w8a8").get("transform_config")
    assert "[8/8] measuring what is lost as it is served" in said.err and "w8a8 nested: KL" in said.out
    files, of_built = ([*folder.glob("merged/*.safetensors")] for folder in (tmp_path, built))
    assert sum(f.stat().st_size for f in files) < 0.9 * sum(f.stat().st_size for f in of_built)
    assert len(files) > len(of_built)
    plain, stored = (result[key]["w8a8"] for key in ("variants", "nested_losses"))
    assert stored.keys() == plain["losses"].keys()
    for kind, loss in stored.items():
        assert loss["kl"] == pytest.approx(plain["losses"][kind]["kl"], rel=0.1)
    of_w8a8 = yaml.safe_load((tmp_path / "merged-variants/w8a8/recipe.yaml").read_text())["variants"]["w8a8"]
    changed = MergedCheckpoint.open(tmp_path / "merged").provenance.changed_integers["w8a8"]
    assert of_w8a8["nested_in"] == "w4a16" and changed < 0.002 * result["variants"]["w8a8"]["num_bytes"]
    assert "more than 0.001 % of perplexity or a KL divergence of 1e-05 is lost by " in said.out
    assert "w4a16 alone on " in said.out
    policy, alone = result["answer_losses"].values()
    assert [*result["answer_losses"]][1] == "w4a16 alone" and policy.keys() == alone.keys() == stored.keys()
    # Prompts in W8A8, as stored, lose less than prompts in W4A16.
    assert sum(loss["kl"] for loss in policy.values()) < sum(loss["kl"] for loss in alone.values())
    assert cli.main(nested[:-2]) == 1
    assert "has a nested variant, unlike what this build makes" in capsys.readouterr().err


def begun(lines: list[str]) -> list[str]:
    """Check that each of eight stages has a line when it begins and one when it ends; return the first."""
    stages = [line for line in lines if line.startswith("[")]
    assert [line[:6] for line in stages] == [f"[{i}/8] " for i in range(1, 9) for _ in range(2)]
    for begin, end in zip(stages[::2], stages[1::2], strict=True):
        assert re.fullmatch(rf"{re.escape(begin)} [\d.]+ s", end)
    return stages[::2]


def test_a_log_file_gets_two_lines_a_stage(model, first_build, capsys):
    folder, output = first_build
    assert len(output) < 5000 and "\r" not in output
    assert "on answers to prompts of 64 tokens, as served," in output and "w4a16 alone" in output
    lines, before = output.splitlines(), digests(folder)
    # The other lines are a note on the calibration text, and the summary of variants, losses and output.
    assert len(lines) - 2 * len(begun(lines)) <= 36
    assert cli.main(command("build", model, folder / "merged")) == 0
    again = begun(capsys.readouterr().err.splitlines())
    assert sum("is finished, and kept" in line for line in again) == 2
    assert digests(folder) == before


# It finds what hides llmcompressor's own lines, which nobody but a developer asks for.
@pytest.mark.full
def test_verbose_shows_what_llmcompressor_prints(model: Path, tmp_path: Path) -> None:
    output = run(command("quantize", model, tmp_path / "variants", "--variants", "w4a16", "--verbose"))
    assert "Calibrating" in output and "[4/4] w4a16: " in output


def run(arguments: list[str]) -> str:
    """Return stdout and stderr of a command, in the order in which they were written."""
    whole = [sys.executable, "-m", "flexquant", *arguments]
    done = subprocess.run(whole, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=SECONDS)
    output = done.stdout.decode()
    assert done.returncode == 0, output
    return output


def test_recipes_and_card_say_how_it_was_made(built: Path, model: Path) -> None:
    card = (built / "merged/README.md").read_text()
    for name in SCHEMES:
        text = (built / "merged" / f"recipe.{name}.yaml").read_text()
        assert text == (built / "merged-variants" / name / "recipe.yaml").read_text()
        recipe = yaml.safe_load(text)
        assert recipe["calibration"]["samples"] == 4
        assert all(modifier in card for modifier in recipe["variants"][name])
        assert recipe["made_with"]["llmcompressor"] in card
    assert model.name in card and "4 samples of 64 tokens" in card


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


@pytest.mark.parametrize(
    "stages", [pytest.param(SOME, id="some"), pytest.param(list(STAGES), id="every", marks=pytest.mark.full)]
)
def test_killed_at_a_stage_and_started_again_it_ends_in_the_same_bytes(stages, model, built, tmp_path):
    processes = multiprocessing.get_context("forkserver")  # forks one that has only imported llmcompressor
    processes.set_forkserver_preload(["flexquant.cli", "llmcompressor", "flexquant.quantization.oneshot"])

    def start_and_wait(until: str) -> int | None:
        """Kill a build when a file is there that matches the pattern; return its exit code."""
        process = processes.Process(target=build, args=(command("build", model, tmp_path / "merged"),))
        process.start()
        deadline = time.monotonic() + SECONDS
        while process.is_alive() and time.monotonic() < deadline and not list(tmp_path.glob(until)):
            time.sleep(0.0005)
        process.kill()
        process.join()
        return process.exitcode

    for stage in stages:
        assert start_and_wait(STAGES[stage]) == -signal.SIGKILL, f"it ended before {stage}"
    finished = {p: p.stat().st_mtime_ns for p in (tmp_path / "merged-variants").glob("*/*")}
    assert start_and_wait("nothing that a build writes") == 0
    assert {p: p.stat().st_mtime_ns for p in finished} == finished, "a finished variant was written again"
    assert digests(tmp_path) == digests(built)


# It kills at random moments of writing, where the test above kills at chosen ones.
@pytest.mark.full
@pytest.mark.parametrize(("name", "written"), [("quantize", ["variants", "--resume"]), ("build", ["merged"])])
def test_killed_it_leaves_nothing_half_done_and_can_run_again(name, written, model, tmp_path):
    folder, *options = written
    kill_often(lambda output: command(name, model, output / folder, *options), tmp_path, 2)


Refused = Callable[..., str]


@pytest.fixture
def refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Return a function that asserts that a build is refused, and changes nothing; it returns the message."""

    def run(output: Path, *options: str, of: Path = model) -> str:
        before = digests(tmp_path)
        assert cli.main(command("build", of, output, *options)) == 1
        assert digests(tmp_path) == before
        return capsys.readouterr().err

    return run


def test_the_model_is_not_replaced(model: Path, tmp_path: Path, refused: Refused) -> None:
    copied = shutil.copytree(model, tmp_path / "model")
    for output in (copied, copied / "merged", tmp_path):
        message = refused(output, "--overwrite", "--recipe", "rtn", of=copied)
        assert f"the output {output} overlaps the input {copied}; choose another folder" in message


@pytest.mark.parametrize("by", ["default", "awq", "a recipe of one's own"])
def test_what_is_rotated_is_not_nested(by: str, built: Path, tmp_path: Path, refused: Refused) -> None:
    if by not in ("default", "awq"):
        by = str(built / "merged-variants/w8a8/recipe.yaml")
    message = refused(tmp_path / "merged", "--nested", "--recipe", by)
    assert f"the recipe '{by}' rotates inputs of 'w8a8', which cannot be nested; take" in message
    assert "[1/" not in message and not [*tmp_path.iterdir()]


def test_a_build_that_differs_needs_overwrite(model, built, tmp_path, refused):
    shutil.copytree(built, tmp_path / "again")
    output = tmp_path / "again/merged"
    assert "--overwrite" in refused(output, "--seed", "1")
    assert cli.main(command("build", model, output, "--seed", "1", "--overwrite")) == 0
    assert digests(tmp_path / "again") != digests(built)
    verify_checkpoint(output)


def test_an_edited_variant_is_told_and_stays(built: Path, tmp_path: Path, refused: Refused) -> None:
    shutil.copytree(built, tmp_path / "again")
    edited = tmp_path / "again/merged-variants/w4a16/tokenizer_config.json"
    edited.write_text(edited.read_text() + "\n")
    message = refused(tmp_path / "again/merged")
    assert "tokenizer_config.json has other content" in message and "--overwrite" in message


def test_a_file_that_was_put_into_a_finished_checkpoint_is_told(built, tmp_path, refused):
    merged = shutil.copytree(built, tmp_path / "again") / "merged"
    (merged / "LICENSE").write_text("of another model")
    assert "has another LICENSE than the variants" in refused(merged)


def test_a_finished_checkpoint_with_other_files_beside_its_weights_is_told(model, built, tmp_path, capsys):
    """The variants are gone, so that nothing but the checkpoint remembers the old generation settings."""
    shutil.copytree(model, tmp_path / "tiny")
    shutil.copytree(built / "merged", tmp_path / "merged")
    (tmp_path / "tiny/generation_config.json").write_text('{"do_sample": true, "temperature": 0.5}')
    before = digests(tmp_path / "merged")
    assert cli.main(command("build", tmp_path / "tiny", tmp_path / "merged")) == 1
    message = capsys.readouterr().err
    assert "generation_config.json" in message and "--overwrite" in message
    assert digests(tmp_path / "merged") == before


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        ("nothing", [], "exists and is not a merged checkpoint"),
        ("a file of mine", [], "exists and is not a merged checkpoint"),
        ("one variant", [], "exists and cannot be gone on with"),
        ("merged", ["--policy", "w8a8"], "stores another default policy than this build's"),
        ("merged", ["--max-shard-size", "100KB"], "has shards of another size than this build's"),
        ("merged", ["--nested"], "lacks a nested variant, unlike what this build makes"),
        ("a policy of its own", [], "stores another default policy than this build's"),
        ("another order", [], "holds the variants w4a16, w8a8, but this build makes w8a8, w4a16"),
    ],
)
def test_an_output_that_cannot_be_gone_on_with_is_refused_first(
    built: Path, tmp_path: Path, refused: Refused, content: str, options: list[str], said: str
) -> None:
    output, variants = tmp_path / "merged", {n: built / "merged-variants" / n for n in SCHEMES}
    if content == "a policy of its own":
        merge_checkpoints(variants, output, policy="w8a8")
    elif content == "another order":
        merge_checkpoints(dict(reversed(variants.items())), output)
    elif content in ("merged", "one variant"):
        shutil.copytree(built / "merged" if content == "merged" else variants["w8a8"], output)
    else:
        output.mkdir()
        if content == "a file of mine":
            (output / "thesis.txt").write_text("years of work")
    message = refused(output, *options)
    assert f"{output} {said}" in message and "choose another folder" in message
    assert "calibrating" not in message and not (tmp_path / "merged-variants").exists()


def test_a_policy_that_the_recipe_cannot_serve_is_refused_first(tmp_path: Path, refused: Refused) -> None:
    output, file, policy = (tmp_path / name for name in ("merged", "recipe.yaml", "policy.yaml"))
    message = refused(output, "--recipe", "fp8", "--policy", "phase")
    assert "uses the variant 'w8a8', but the recipe 'fp8' makes fp8, w4a16" in message
    modifiers = "{GPTQModifier: {targets: [Linear], ignore: [lm_head], scheme: W8A8}}"
    recipe = f"schema: flexquant.recipe/v1\nvariants: {{a: {modifiers}, b: {modifiers}}}\n"
    file.write_text(recipe)
    assert "the policy 'phase-batch' uses the variant" in refused(output, "--recipe", str(file))
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
    file.write_text(recipe.partition(", b:")[0] + "}\n")  # one variant needs no policy
    message = refused(output, "--recipe", str(file), "--calibration", "none.txt")
    assert "there is no file none.txt; give a file" in message
    policy.write_text(rules('- use: {default: w4a16, layers: {"7": w8a8}}'))
    message = refused(output, "--recipe", "rtn", "--policy", str(policy))
    assert "7" in message and "[2/" not in message


def test_the_fp8_recipe_needs_data_for_w4a16_alone_and_stores_its_policy(model, tmp_path, capsys):
    assert cli.main(command("build", model, tmp_path / "merged", "--recipe", "fp8")) == 0
    assert "fp8: quantising without calibration" in capsys.readouterr().err
    tensors = load_file(tmp_path / "merged-variants/fp8/model.safetensors")
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    assert report(tmp_path / "merged-variants/fp8")["calibration"] is None
    assert section(tmp_path / "merged")["policy"]["rules"][-1] == {"use": "fp8"}
    assert (tmp_path / "merged/recipe.fp8.yaml").is_file()


def test_summary_and_json(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command("quantize", model, tmp_path / "variants", "--json")
    assert cli.main([*arguments, "--variants", "w8a8"]) == 0
    printed = capsys.readouterr()
    file = tmp_path / "variants/calibration.jsonl"
    assert f"[2/4] the model writes its calibration text, {file} ..." in printed.err and file.read_text()
    first, second, lost, *table, last = printed.out.splitlines()
    assert first.startswith("w8a8: ") and "6 groups of linears smoothed" in first
    assert "alpha searched per layer: quantisation MSE" in second
    assert lost.startswith("lost against the 16-bit model") and table[0].startswith("text ")
    (variant,) = json.loads(last)["variants"].values()
    assert {row.split()[0] for row in table[1:] if "%" in row} >= variant["losses"].keys()
    assert variant["num_bytes"] == (tmp_path / "variants/w8a8/model.safetensors").stat().st_size

    arguments += ["--recipe", "rtn", "--variants", "w4a16", "--resume"]
    assert cli.main(arguments) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert "groups of 128" in first and list(json.loads(last)["variants"]) == ["w4a16"]
    assert cli.main(arguments) == 0
    assert "kept from an earlier run" in capsys.readouterr().out


def test_the_readmes_commands(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-model").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    for shown in readme.commands():
        if shown.startswith(("flexquant quantize", "flexquant build")):
            assert cli.main([*shlex.split(shown)[1:], *OPTIONS]) == 0
    assert {p.name for p in (tmp_path / "my-variants").iterdir()} == {"calibration.jsonl", "w8a8", "w4a16"}
    assert (tmp_path / "my-model-merged").is_dir()
