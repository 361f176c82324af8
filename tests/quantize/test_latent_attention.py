# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Multi-head latent attention: what expands the cached latent stays in 16 bit, all else is quantised."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexquant.checkpoint.folder import read_tensors
from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints
from tests.checkpoints import make_checkpoint
from tests.quantize.quantizing import RTN, quantize, recipe

ATTENTION = "model.layers.0.self_attn"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latent")
    return make_checkpoint(folder / "model", "deepseek_v2", scheme=None, num_layers=1)


def test_the_default_recipe_gives_variants_that_share_a_cache_of_latents(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path)
    for name, end in (("w8a8", "weight"), ("w4a16", "weight_packed")):
        tensors = read_tensors(tmp_path / name)
        assert tensors[f"{ATTENTION}.kv_b_proj.weight"].dtype == "BF16"
        assert tensors[f"{ATTENTION}.kv_a_proj_with_mqa.{end}"].dtype != "BF16"
    merge_checkpoints({name: tmp_path / name for name in ("w8a8", "w4a16")}, tmp_path / "merged")


def test_a_recipe_that_would_quantise_it_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(FlexQuantError, match=r"kv_b_proj would be quantised; add 're:\.\*kv_b_proj\$'"):
        quantize(model, tmp_path / "variants", recipe(v=RTN))
    assert not (tmp_path / "variants").exists()
