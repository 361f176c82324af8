# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Rotated inputs of a linear are undone where its matrix is read."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from flexquant.checkpoint.merged_config import read_merged_config
from flexquant.checkpoint.weight_bytes import describe_scheme
from flexquant.merge import merge_checkpoints
from flexquant.merge.formats import open_source
from flexquant.merge.kv.dequantize import WeightReader
from tests.checkpoints import make_checkpoint
from tests.refusals import refused
from tests.rotations import BLOCK, make_rotated, rotation

DOWN = "model.layers.{}.mlp.down_proj"


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16", "fp8"])
def test_the_matrix_and_its_noise_are_those_before_the_rotation(tmp_path, scheme):
    plain = load_file(make_checkpoint(tmp_path / "plain", scheme=None) / "model.safetensors")
    reader = WeightReader(open_source("rotated", make_rotated(tmp_path / "rotated", scheme)))
    for layer in range(2):
        read, expected = reader.open(DOWN.format(layer)).read(), plain[f"{DOWN.format(layer)}.weight"].float()
        assert 0.7 < (read.matrix() - expected).square().mean() / read.variances().mean() < 1.4
    part = reader.open(DOWN.format(0)).read([range(3, 9)]).matrix()
    assert torch.equal(part, reader.open(DOWN.format(0)).read().matrix()[3:9])


def test_layers_of_rotated_and_plain_linears_mix(tmp_path):
    sources = {
        "w8a8": make_rotated(tmp_path / "w8a8", "w8a8"),
        "w4a16": make_checkpoint(tmp_path / "w4a16", scheme="w4a16"),
    }
    merge_checkpoints(sources, tmp_path / "merged")
    merged, _ = read_merged_config(tmp_path / "merged")
    section = merged.variants["w8a8"].quantization_config
    section["config_groups"]["group_0"]["input_activations"]["symmetric"] = False
    assert describe_scheme(section).endswith("activations (token, dynamic, asymmetric); rotated in each pass")
    assert [sorted(group) for group in merged.mixable_groups] == [["w4a16", "w8a8"]]
    with refused("cannot be nested in 'w4a16': each pass rotates the inputs of .* 'w8a8'"):
        merge_checkpoints(sources, tmp_path / "nested", nested="near")


def test_rotations_that_vllm_leaves_out_are_refused(tmp_path):
    folder = make_rotated(tmp_path / "w8a8", "w8a8")
    config = json.loads((folder / "config.json").read_text())
    (group,) = config["quantization_config"]["transform_config"]["config_groups"].values()
    group["apply"][0]["targets"] = ["re:.*(down_proj|lm_head|embed_tokens)$"]
    (folder / "config.json").write_text(json.dumps(config))
    reader = WeightReader(open_source("rotated", folder))
    with refused("'lm_head' .* are rotated by its config, and not by vLLM"):
        reader.open("lm_head")
    reader.open("model.embed_tokens")  # looked up, and not multiplied


@pytest.mark.parametrize(
    ("matrix", "problem"),
    [
        (rotation(1), r"layer 0 mlp\.down_proj"),
        (torch.ones(2 * BLOCK, 2 * BLOCK), r"by 'v', whose matrix \[32, 32\] is not"),
    ],
    ids=["another", "of another size"],
)
def test_a_matrix_that_does_not_belong_to_the_weights_is_found(tmp_path, matrix, problem):
    sources = {
        "w8a8": make_rotated(tmp_path / "w8a8", "w8a8", matrix),
        "w4a16": make_checkpoint(tmp_path / "w4a16", scheme="w4a16"),
    }
    with refused(problem):
        merge_checkpoints(sources, tmp_path / "merged")
