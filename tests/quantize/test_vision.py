# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Vision models: quantised with llm-compressor itself, as the page shows; recipes are for text models."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexquant.checkpoint.folder import read_tensors
from flexquant.checkpoint.served_config import read_merged_config
from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints
from tests.quantize.quantizing import quantize
from tests.readme import blocks
from tests.vision import make_vision_checkpoint


def test_what_the_page_shows_gives_variants_that_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = [block for block in blocks("python") if "my-vision-model" in block]
    make_vision_checkpoint(tmp_path / "my-vision-model", scheme=None)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    variants = {name: tmp_path / "my-vision-variants" / name for name in ("w8a8", "w4a16")}
    merge_checkpoints(variants, tmp_path / "merged")
    merged, _ = read_merged_config(tmp_path / "merged")
    assert {"model.vision_model", "model.connector"} < set(merged.shared_modules)
    assert merged.layered_plans
    projection = "model.text_model.layers.0.self_attn.q_proj.weight"
    keys = read_tensors(tmp_path / "merged").keys()
    assert {f"w8a8.{projection}_scale", f"w4a16.{projection}_packed"} < keys


def test_recipes_refuse_a_vision_model_and_say_what_to_do(tmp_path: Path) -> None:
    model = make_vision_checkpoint(tmp_path / "model", scheme=None)
    with pytest.raises(FlexQuantError, match=r"\('idefics3'\).*with llm-compressor itself.*Vision models"):
        quantize(model, tmp_path / "variants")
    assert not (tmp_path / "variants").exists()
