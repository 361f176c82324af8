# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Starting again keeps what is finished and the same, and replaces other things only when told to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from flexquant.errors import FlexQuantError
from flexquant.quantization.report import REPORT_FILE
from tests.checkpoints import make_checkpoint
from tests.quantize.folders import digests
from tests.quantize.quantizing import RTN, W4A16, quantize, recipe, recorder

TWO = recipe(w8a8=RTN, w4a16=W4A16)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("small") / "model", scheme=None, num_layers=1)


@pytest.fixture(scope="module")
def first_run(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("first") / "variants"
    quantize(small, output, TWO)
    return output


@pytest.fixture
def finished(first_run: Path, tmp_path: Path) -> Path:
    """Return what a first run leaves, for tests to change."""
    return Path(shutil.copytree(first_run, tmp_path / "variants"))


def test_what_is_finished_stays_and_what_is_gone_is_made_again(small: Path, finished: Path) -> None:
    written = finished / "w8a8/model.safetensors"
    expected, time = digests(finished), written.stat().st_mtime_ns
    said: list[str] = []
    results = quantize(small, finished, TWO, resume=True, stage=recorder(said))
    assert [result.kept for result in results] == [True, True]
    assert f"w8a8: {finished / 'w8a8'} is finished, and kept" in said

    shutil.rmtree(finished / "w4a16")
    results = quantize(small, finished, TWO, resume=True)
    assert [result.kept for result in results] == [True, False]
    assert written.stat().st_mtime_ns == time and digests(finished) == expected


def test_what_a_killed_run_left_beside_finished_variants_goes(small: Path, finished: Path) -> None:
    """The run was killed after the variant was in its place, and between the two renames that replace one."""
    expected = digests(finished)
    (finished / ".w8a8.flexquant-tmp").mkdir()
    (finished / ".w8a8.flexquant-tmp/config.json").write_text("{}")
    (finished / "w4a16").rename(finished / ".w4a16.flexquant-old")
    results = quantize(small, finished, TWO, resume=True)
    assert [result.kept for result in results] == [True, True]
    assert digests(finished) == expected


def test_a_changed_or_missing_file_is_named_and_the_variant_replaced_only_when_told_to(
    small: Path, finished: Path
) -> None:
    expected = digests(finished)
    edited, missing = finished / "w8a8/tokenizer_config.json", finished / "w8a8/config.json"
    edited.write_text(edited.read_text() + "\n")
    missing.unlink()
    (finished / "w8a8/chat_template.jinja").write_text("{{ messages }}")
    before = digests(finished)
    named = "w8a8 was changed after it was made: config.json is missing, "
    named += "tokenizer_config.json has other content, chat_template.jinja was added"
    with pytest.raises(FlexQuantError, match=f"{named}; .*--overwrite"):
        quantize(small, finished, TWO, resume=True)
    assert digests(finished) == before
    results = quantize(small, finished, TWO, resume=True, overwrite=True)
    assert [result.kept for result in results] == [False, True]
    assert digests(finished) == expected


def test_a_variant_damaged_at_equal_size_is_told(small: Path, finished: Path) -> None:
    file = finished / "w8a8/model.safetensors"
    tensors, size = load_file(file), file.stat().st_size
    tensors["model.layers.0.mlp.gate_proj.weight"].zero_()
    save_file(tensors, file, metadata={"format": "pt"})
    assert file.stat().st_size == size
    with pytest.raises(FlexQuantError, match=r"w8a8 was changed .*: model.safetensors has other content; "):
        quantize(small, finished, TWO, resume=True)


def test_a_damaged_report_is_told_and_the_variant_made_again_when_told_to(
    small: Path, finished: Path
) -> None:
    expected = digests(finished)
    for damaged in ('{"schema": ', "[]", '{"files": {}}'):
        (finished / "w8a8" / REPORT_FILE).write_text(damaged)
        with pytest.raises(FlexQuantError, match=f"w8a8/{REPORT_FILE} .*--overwrite"):
            quantize(small, finished, TWO, resume=True)
    results = quantize(small, finished, TWO, resume=True, overwrite=True)
    assert [result.kept for result in results] == [False, True]
    assert digests(finished) == expected


def test_changed_files_beside_the_weights_are_noticed(tmp_path: Path) -> None:
    """A variant has copies of these files: one changes, some come, one goes."""
    model = make_checkpoint(tmp_path / "model", scheme=None, num_layers=1)
    by, output = recipe(w8a8=RTN), tmp_path / "variants"
    quantize(model, output, by)
    names = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json", "LICENSE")
    before = {name: (model / name).read_text() if (model / name).exists() else None for name in names}
    for name, text in before.items():
        (model / name).write_text(f"{text} " if text is not None else "{}")
        with pytest.raises(FlexQuantError, match=f"w8a8 was made with different {name}; .*--overwrite"):
            quantize(model, output, by, resume=True)
        if text is None:
            (model / name).unlink()
        else:
            (model / name).write_text(text)
    (model / "LICENSE").write_text("mine")
    quantize(model, output, by, resume=True, overwrite=True)
    assert (output / "w8a8/LICENSE").read_text() == "mine"
    (model / "LICENSE").unlink()
    with pytest.raises(FlexQuantError, match="w8a8 was made with different LICENSE; .*--overwrite"):
        quantize(model, output, by, resume=True)


def test_the_order_of_modifiers_is_noticed(small: Path, tmp_path: Path) -> None:
    """Both orders smooth the same norms, so the first one decides what the second one sees."""
    smooth = {"SmoothQuantModifier": {"smoothing_strength": 0.5, "mappings": "norms"}}
    awq = {"AWQModifier": {"mappings": "norms"}}
    quantize(small, tmp_path / "variants", recipe(w4a16={**smooth, **awq, **W4A16}))
    with pytest.raises(FlexQuantError, match="w4a16 was made with different recipe; .*--overwrite"):
        quantize(small, tmp_path / "variants", recipe(w4a16={**awq, **smooth, **W4A16}), resume=True)


def test_a_run_that_is_refused_has_deleted_nothing(small: Path, finished: Path) -> None:
    """The first variant lost a file, the second was made otherwise: the refusal names both, and both stay."""
    (finished / "w8a8/generation_config.json").unlink()
    before = digests(finished)
    with pytest.raises(FlexQuantError) as refusal:
        quantize(small, finished, TWO, seed=1, resume=True)
    assert "generation_config.json is missing" in str(refusal.value)
    assert "w4a16 was made with different" in str(refusal.value)
    assert digests(finished) == before


def test_what_was_made_otherwise_is_replaced_only_when_told_to(small: Path, finished: Path) -> None:
    before = digests(finished)
    with pytest.raises(FlexQuantError, match=r"w8a8 exists; .*--overwrite"):
        quantize(small, finished, TWO)
    with pytest.raises(
        FlexQuantError, match=r"w4a16 was made with different calibration rows, seed; .*--overwrite"
    ):
        quantize(small, finished, TWO, seed=1, resume=True)
    assert digests(finished) == before
    results = quantize(small, finished, TWO, seed=1, resume=True, overwrite=True)
    # The calibration-free variant does not depend on the samples.
    assert [result.kept for result in results] == [True, False]
    after = digests(finished)
    assert after.keys() == before.keys()
    assert after["w8a8/model.safetensors"] == before["w8a8/model.safetensors"]
    assert after["w4a16/model.safetensors"] != before["w4a16/model.safetensors"]


def test_another_model_or_recipe_is_noticed(small: Path, finished: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "model", scheme=None, num_layers=1, seed=1)
    with pytest.raises(FlexQuantError, match="w8a8 was made with different weights; .*--overwrite"):
        quantize(other, finished, TWO, resume=True)
    changed = {"QuantizationModifier": {**RTN["QuantizationModifier"], "weight_observer": "memoryless_mse"}}
    with pytest.raises(FlexQuantError, match="w8a8 was made with different recipe; .*--overwrite"):
        quantize(small, finished, recipe(w8a8=changed), resume=True)


def test_a_folder_of_something_else_is_never_replaced(small: Path, tmp_path: Path) -> None:
    mine = tmp_path / "variants/w8a8/thesis.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("years of work")
    for options in ({"resume": True}, {"resume": True, "overwrite": True}):
        with pytest.raises(FlexQuantError, match="w8a8 (exists|is not a checkpoint folder)"):
            quantize(small, tmp_path / "variants", TWO, **options)
    assert mine.read_text() == "years of work"
