# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Starting again keeps what is finished and the same, and replaces other things only when told to.

Where files did not fit, one sentence says so, nothing is half done, and the next run succeeds.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from flexquant import cli
from flexquant.errors import FlexQuantError
from flexquant.merge import verify_checkpoint
from flexquant.quantization.recipe import Recipe
from flexquant.quantization.report import REPORT_FILE
from tests import programs
from tests.checkpoints import make_checkpoint
from tests.quantize.quantizing import OPTIONS, RTN, W4A16, digests, quantize, recipe, recorder

TWO = recipe(w8a8=RTN, w4a16=W4A16)


@pytest.fixture(scope="module")
def first_run(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("first") / "variants"
    quantize(small, output, TWO)
    return output


def refused(match: str, model: Path, output: Path, by: Recipe = TWO, **options: Any) -> None:
    """Assert that starting again is refused, that it names --overwrite, and that nothing is changed."""
    before = digests(output)
    with pytest.raises(FlexQuantError, match=f"{match}; .*--overwrite"):
        quantize(model, output, by, resume=True, **options)
    assert digests(output) == before


def kept(model: Path, output: Path, by: Recipe = TWO, **options: Any) -> list[bool]:
    """Start again, and return which variants were kept."""
    return [result.kept for result in quantize(model, output, by, resume=True, **options)]


def test_what_is_finished_stays_and_what_is_gone_is_made_again(small: Path, finished: Path) -> None:
    written = finished / "w8a8/model.safetensors"
    expected, time, said = digests(finished), written.stat().st_mtime_ns, list[str]()
    assert kept(small, finished, stage=recorder(said)) == [True, True]
    assert f"w8a8: {finished / 'w8a8'} is finished, and kept" in said
    shutil.rmtree(finished / "w4a16")
    assert kept(small, finished) == [True, False]
    assert written.stat().st_mtime_ns == time and digests(finished) == expected


def test_what_is_finished_needs_no_room(small: Path, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    assert kept(small, finished) == [True, True]
    shutil.rmtree(finished / "w4a16")
    with pytest.raises(FlexQuantError, match=r"needs .* of free disk space, but .* has 0 bytes"):
        kept(small, finished)


def test_what_a_killed_run_left_beside_finished_variants_goes(small: Path, finished: Path) -> None:
    """The run was killed after the variant was in its place, and between the two renames that replace one."""
    expected = digests(finished)
    (finished / ".w8a8.flexquant-tmp").mkdir()
    (finished / ".w8a8.flexquant-tmp/config.json").write_text("{}")
    (finished / "w4a16").rename(finished / ".w4a16.flexquant-old")
    assert kept(small, finished) == [True, True]
    assert digests(finished) == expected


def test_changed_files_are_named_and_the_variant_replaced_only_when_told_to(small, finished):
    expected, w8a8 = digests(finished), finished / "w8a8"
    weights = w8a8 / "model.safetensors"
    tensors, size = load_file(weights), weights.stat().st_size
    tensors["model.layers.0.mlp.gate_proj.weight"].zero_()
    save_file(tensors, weights, metadata={"format": "pt"})
    assert weights.stat().st_size == size
    refused(r"w8a8 was changed .*: model.safetensors has other content", small, finished)
    (w8a8 / "tokenizer_config.json").write_text((w8a8 / "tokenizer_config.json").read_text() + "\n")
    (w8a8 / "config.json").unlink()
    (w8a8 / "chat_template.jinja").write_text("{{ messages }}")
    named = "w8a8 was changed after it was made: config.json is missing, model.safetensors has other content"
    named += ", tokenizer_config.json has other content, chat_template.jinja was added"
    refused(named, small, finished)
    assert kept(small, finished, overwrite=True) == [False, True]
    assert digests(finished) == expected


def test_a_damaged_report_is_told_and_the_variant_made_again_when_told_to(small, finished):
    expected = digests(finished)
    for damaged in ('{"schema": ', "[]", '{"files": {}}'):
        (finished / "w8a8" / REPORT_FILE).write_text(damaged)
        refused(f"w8a8/{REPORT_FILE} .*", small, finished)
    assert kept(small, finished, overwrite=True) == [False, True]
    assert digests(finished) == expected


def test_changed_files_beside_the_weights_are_noticed(own: Path, finished: Path) -> None:
    """A variant has copies of these files: one changes, some come, one goes."""
    by = recipe(w8a8=RTN)
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json", "LICENSE"):
        before = (own / name).read_text() if (own / name).exists() else ""
        (own / name).write_text(f"{before or '{}'} ")
        refused(f"w8a8 was made with different {name}", own, finished, by)
        (own / name).write_text(before) if before else (own / name).unlink()
    (own / "LICENSE").write_text("mine")
    assert kept(own, finished, by, overwrite=True) == [False]
    assert (finished / "w8a8/LICENSE").read_text() == "mine"
    (own / "LICENSE").unlink()
    refused("w8a8 was made with different LICENSE", own, finished, by)


def test_the_order_of_modifiers_is_noticed(small: Path, tmp_path: Path) -> None:
    """Both orders smooth the same norms, so the first one decides what the second one sees."""
    smooth = {"SmoothQuantModifier": {"smoothing_strength": 0.5, "mappings": "norms"}}
    awq = {"AWQModifier": {"mappings": "norms"}}
    quantize(small, tmp_path, recipe(w4a16={**smooth, **awq, **W4A16}))
    other_order = recipe(w4a16={**awq, **smooth, **W4A16})
    refused("w4a16 was made with different recipe", small, tmp_path, other_order)


def test_a_run_that_is_refused_has_deleted_nothing(small: Path, finished: Path) -> None:
    """The first variant lost a file, the second was made otherwise: the refusal names both, and both stay."""
    (finished / "w8a8/generation_config.json").unlink()
    both = "generation_config.json is missing.*w4a16 was made with different calibration rows, seed"
    refused(both, small, finished, seed=1)


def test_what_was_made_otherwise_is_replaced_only_when_told_to(small, finished, tmp_path):
    other = make_checkpoint(tmp_path / "model", scheme=None, num_layers=1, seed=1)
    refused("w8a8 was made with different weights", other, finished)
    changed = {"QuantizationModifier": {**RTN["QuantizationModifier"], "weight_observer": "memoryless_mse"}}
    refused("w8a8 was made with different recipe", small, finished, recipe(w8a8=changed))
    refused("w4a16 was made with different calibration rows, seed", small, finished, seed=1)
    before = digests(finished)
    with pytest.raises(FlexQuantError, match=r"w8a8 is finished; .*--overwrite"):
        quantize(small, finished, TWO)
    assert digests(finished) == before
    # The calibration-free variant does not depend on the samples.
    assert kept(small, finished, seed=1, overwrite=True) == [True, False]
    after = digests(finished)
    assert after.keys() == before.keys()
    assert after["w8a8/model.safetensors"] == before["w8a8/model.safetensors"]
    assert after["w4a16/model.safetensors"] != before["w4a16/model.safetensors"]


def test_a_folder_of_something_else_is_never_replaced(small: Path, tmp_path: Path) -> None:
    mine = tmp_path / "variants/w8a8/thesis.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("years of work")
    for options in ({"resume": True}, {"resume": True, "overwrite": True}):
        with pytest.raises(FlexQuantError, match="w8a8 (exists|is not a checkpoint folder)"):
            quantize(small, tmp_path / "variants", TWO, **options)
    assert mine.read_text() == "years of work"


SECONDS = 600


@pytest.mark.parametrize("most", [pytest.param(4096, marks=pytest.mark.full), 65536])
def test_a_variant_that_does_not_fit(model, tmp_path, most, capsys):
    output = tmp_path / "variants"
    command = ["quantize", str(model), "--output", str(output), "--resume", *OPTIONS]
    said = f"flexquant quantize: error: the disk ran full while writing {output / 'w8a8'}"
    assert programs.disk_full(command, most, capsys).startswith(said)
    assert digests(tmp_path).keys() == {"variants/calibration.jsonl"}, "which is whole"
    assert cli.main(command) == 0
    assert {"w8a8/config.json", "w4a16/config.json"} <= digests(output).keys()


# The unit tests know the check of free space; this one finds that quantising no longer asks it.
@pytest.mark.full
def test_a_disk_without_room_is_told_before_quantising(model: Path, tmp_path: Path) -> None:
    mounted = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mounted += ['mount -t tmpfs -o size=128k tmpfs "$0" || exit 77; "$@"', str(tmp_path)]
    if subprocess.run([*mounted, "true"], capture_output=True, timeout=SECONDS).returncode:
        pytest.skip("this machine does not let its users mount a disk of their own")
    command = ["quantize", model, "--output", tmp_path / "variants", "--recipe", "rtn"]
    done = programs.run([*mounted, sys.executable, "-m", "flexquant", *command], timeout=SECONDS, status=1)
    assert re.search(r"needs [\d.]+ KiB of free disk space, but .* has [\d.]+ KiB", done.stderr)
    assert "quantising" not in done.stderr


def test_a_merge_that_does_not_fit_keeps_the_variants(model, variants, tmp_path, capsys):
    """The variants are from an earlier run, with files larger than now fit."""
    output, kept = tmp_path / "merged", tmp_path / "merged-variants"
    shutil.copytree(variants, kept)
    before = digests(tmp_path)
    command = ["build", str(model), "--output", str(output), *OPTIONS]
    said = f"flexquant build: error: the disk ran full while writing {output}"
    assert programs.disk_full(command, 65536, capsys).startswith(said)
    assert digests(tmp_path) == before
    assert cli.main(command) == 0
    assert digests(kept) == digests(variants)
    verify_checkpoint(output, {name: kept / name for name in ("w8a8", "w4a16")})
