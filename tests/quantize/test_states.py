# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A model whose layers carry a state (Qwen3-Next, with experts), from 16 bit to the merged checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from flexquant import cli
from flexquant.checkpoint.folder import read_tensors
from flexquant.checkpoint.schemes import LinearSchemes
from flexquant.merge import verify_checkpoint
from tests.architectures.models import random_model, small_config, split
from tests.checkpoints import write_checkpoint

FEW = ["--samples", "4", "--length", "64"]
STATE = "model.layers.0.linear_attn"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    config = small_config(
        "qwen3_next", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    )
    model = random_model(config)
    model.config.architectures = ["Qwen3NextForCausalLM"]
    write_checkpoint(folder / "model", model.config, split(model)[0], None, set(), [])
    assert cli.main(["build", str(folder / "model"), "--output", str(folder / "merged"), *FEW]) == 0
    return folder


def test_variants_that_share_a_state_are_built_and_merged(built: Path) -> None:
    variants = {name: built / "merged-variants" / name for name in ("w8a8", "w4a16")}
    assert set(verify_checkpoint(built / "merged", variants)["tensors_compared_with"]) == set(variants)
    for name, end in (("w8a8", "weight"), ("w4a16", "weight_packed")):
        tensors = read_tensors(variants[name])
        assert tensors[f"{STATE}.in_proj_qkvz.{end}"].dtype != "BF16"
        assert tensors[f"{STATE}.out_proj.{end}"].dtype != "BF16"
        for left in ("in_proj_ba.weight", "conv1d.weight", "A_log", "dt_bias", "norm.weight"):
            assert tensors[f"{STATE}.{left}"].dtype == "BF16"
        section = json.loads((variants[name] / "config.json").read_text())["quantization_config"]
        schemes = LinearSchemes(section, name, [])
        assert schemes.of(f"{STATE}.in_proj_ba") is None and schemes.of(f"{STATE}.in_proj_qkvz") is not None
        assert schemes.of("model.layers.0.mlp.shared_expert_gate") is None


def test_the_recipe_tells_what_was_left_in_16_bit_and_how_the_norm_was_folded(built: Path) -> None:
    recipe = yaml.safe_load((built / "merged-variants" / "w8a8" / "recipe.yaml").read_text())
    (variant,) = recipe["variants"].values()
    assert r"re:.*\.linear_attn\.in_proj_ba$" in variant["GPTQModifier"]["ignore"]
    strengths = variant["SmoothQuantModifier"]["smoothing_strength"]
    assert strengths.keys() == {f"model.layers.{layer}.input_layernorm" for layer in range(2)}
    mappings = variant["SmoothQuantModifier"]["mappings"]
    assert [[f"{STATE}.in_proj_qkvz", f"{STATE}.in_proj_ba"], "model.layers.0.input_layernorm"] in mappings
