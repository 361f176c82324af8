# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Starting again keeps what is finished and the same, and replaces other things only when told to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flexquant.errors import FlexQuantError
from tests.checkpoints import make_checkpoint
from tests.quantize.folders import digests
from tests.quantize.quantizing import RTN, W4A16, quantize, recipe

TWO = recipe(w8a8=RTN, w4a16=W4A16)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("small") / "model", scheme=None, num_layers=1)


@pytest.fixture
def finished(small: Path, tmp_path: Path) -> Path:
    output = tmp_path / "variants"
    quantize(small, output, TWO)
    return output


def test_what_is_finished_stays_and_what_is_gone_or_half_is_made_again(small: Path, finished: Path) -> None:
    written = finished / "w8a8/model.safetensors"
    expected, time = digests(finished), written.stat().st_mtime_ns
    said: list[str] = []
    results = quantize(small, finished, TWO, resume=True, progress=said.append)
    assert [result.kept for result in results] == [True, True]
    assert f"w8a8: {finished / 'w8a8'} is finished, and kept" in said

    shutil.rmtree(finished / "w4a16")
    results = quantize(small, finished, TWO, resume=True)
    assert [result.kept for result in results] == [True, False]
    assert written.stat().st_mtime_ns == time and digests(finished) == expected

    (finished / "w4a16/config.json").unlink()
    results = quantize(small, finished, TWO, resume=True)
    assert [result.kept for result in results] == [True, False]
    assert digests(finished) == expected


def test_what_was_made_otherwise_is_replaced_only_when_told_to(small: Path, finished: Path) -> None:
    before = digests(finished)
    with pytest.raises(FlexQuantError, match=r"w8a8 exists; .*--overwrite"):
        quantize(small, finished, TWO)
    with pytest.raises(FlexQuantError, match=r"w4a16 was made from another .*; replace it with --overwrite"):
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
    with pytest.raises(FlexQuantError, match="was made from another model"):
        quantize(other, finished, TWO, resume=True)
    changed = {"QuantizationModifier": {**RTN["QuantizationModifier"], "weight_observer": "memoryless_mse"}}
    with pytest.raises(FlexQuantError, match="was made from another model, recipe"):
        quantize(small, finished, recipe(w8a8=changed), resume=True)


def test_a_folder_of_something_else_is_never_replaced(small: Path, tmp_path: Path) -> None:
    mine = tmp_path / "variants/w8a8/thesis.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("years of work")
    for options in ({"resume": True}, {"resume": True, "overwrite": True}):
        with pytest.raises(FlexQuantError, match="w8a8 (exists|is not a checkpoint folder)"):
            quantize(small, tmp_path / "variants", TWO, **options)
    assert mine.read_text() == "years of work"
