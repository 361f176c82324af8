# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Mixtures of experts: every expert is calibrated and quantised by itself, routers stay in 16 bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexquant.checkpoint.folder import read_tensors
from flexquant.checkpoint.module_names import EXPERTS
from flexquant.checkpoint.schemes import LinearSchemes
from flexquant.checkpoint.served_config import read_merged_config
from flexquant.merge import merge_checkpoints
from tests.checkpoints import MIXTURES, make_checkpoint
from tests.quantize.quantizing import quantize

ROUTER = {"mixtral": "block_sparse_moe.gate", "qwen2_moe": "mlp.gate", "qwen3_moe": "mlp.gate"}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mixtures")
    return {name: make_checkpoint(folder / name, name, scheme=None, num_layers=1) for name in MIXTURES}


def experts_of(folder: Path) -> set[str]:
    """Return the ends of the names of a checkpoint's experts' tensors."""
    return {name.rsplit(".", 1)[-1] for name in read_tensors(folder) if EXPERTS.match(name)}


@pytest.mark.parametrize("architecture", MIXTURES)
def test_experts_are_quantised_under_their_published_names(architecture, models, tmp_path):
    quantize(models[architecture], tmp_path)
    linears = {name for name in read_tensors(models[architecture]) if EXPERTS.match(name)}
    for variant, ends in (("w8a8", ("", "_scale")), ("w4a16", ("_packed", "_scale", "_shape"))):
        tensors = read_tensors(tmp_path / variant)
        assert {name for name in tensors if EXPERTS.match(name)} == {n + end for n in linears for end in ends}
        router = f"model.layers.0.{ROUTER[architecture]}"
        assert tensors[f"{router}.weight"].dtype == "BF16"
        section = json.loads((tmp_path / variant / "config.json").read_text())["quantization_config"]
        assert LinearSchemes(section, variant, []).of(router) is None
    merge_checkpoints({name: tmp_path / name for name in ("w8a8", "w4a16")}, tmp_path / "merged")
    assert not any("experts" in name for name in read_merged_config(tmp_path / "merged")[0].shared_modules)


def test_experts_in_16_bit_are_stored_once(models, tmp_path):
    quantize(models["qwen3_moe"], tmp_path, "experts-in-16-bit")
    for variant in ("w8a8", "w4a16"):
        assert experts_of(tmp_path / variant) == {"weight"}
    merge_checkpoints({name: tmp_path / name for name in ("w8a8", "w4a16")}, tmp_path / "merged")
    merged, _ = read_merged_config(tmp_path / "merged")
    assert "model.layers.0.mlp.experts" in merged.shared_modules
