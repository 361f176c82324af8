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
from tests.vision import KINDS, make_vision_checkpoint


@pytest.mark.parametrize("name", KINDS)
def test_what_the_page_shows_gives_variants_that_merge(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = [block for block in blocks("python") if "my-vision-model" in block]
    kind, of_the_page = KINDS[name], repr(list(KINDS["idefics3"].towers))[1:-1].replace("'", '"')
    assert of_the_page in code
    make_vision_checkpoint(tmp_path / "my-vision-model", None, kind)
    monkeypatch.chdir(tmp_path)
    exec(code.replace(of_the_page, repr([*kind.towers, *kind.in_16_bit])[1:-1]), {})
    variants = {name: tmp_path / "my-vision-variants" / name for name in ("w8a8", "w4a16")}
    merge_checkpoints(variants, tmp_path / "merged")
    merged, _ = read_merged_config(tmp_path / "merged")
    towers = {tower.removeprefix("re:.*").removesuffix(".*") for tower in kind.towers}
    assert towers <= {module.rpartition(".")[2] for module in merged.shared_modules}
    assert merged.layered_plans
    projections = [
        key for key in read_tensors(tmp_path / "merged") if "layers.3.self_attn.q_proj.weight_" in key
    ]
    assert {(key.split(".")[0], key.rpartition("_")[2]) for key in projections} >= {
        ("w8a8", "scale"),
        ("w4a16", "packed"),
    }


def test_recipes_refuse_a_vision_model_and_say_what_to_do(tmp_path: Path) -> None:
    model = make_vision_checkpoint(tmp_path / "model", scheme=None)
    with pytest.raises(FlexQuantError, match=r"\('idefics3'\).*with llm-compressor itself.*Vision models"):
        quantize(model, tmp_path / "variants")
    assert not (tmp_path / "variants").exists()
