# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What vLLM switches by a checkpoint's quantisation is as for the variants' own checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flexquant.checkpoint.model_config import JsonObject
from tests.integration.test_serving_errors import configure, flexquant

FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
BLOCKS = {
    "weights": {**FP8, "strategy": "block", "block_structure": [128, 128]},
    "input_activations": {**FP8, "strategy": "group", "group_size": 128, "dynamic": True},
}
BLOCK_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


@pytest.fixture
def merged(tiny_merged: Any) -> Path:
    return tiny_merged() / "merged"


def stored(merged: Path, folder: Path, section: JsonObject, **config: Any) -> Path:
    shutil.copytree(merged, folder)
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**whole, **config, "quantization_config": section}))
    return folder


def with_variant(merged: Path, folder: Path, **scheme: Any) -> Path:
    """Return a merged checkpoint whose variant ``w8a8`` says that it is quantised in another way."""
    section = json.loads((merged / "config.json").read_text())["quantization_config"]
    of_w8a8 = section["variants"]["w8a8"]["quantization_config"]
    group = {"targets": ["Linear"], **{key: scheme.pop(key) for key in BLOCKS if key in scheme}}
    section["variants"]["w8a8"]["quantization_config"] = {
        **of_w8a8,
        **scheme,
        "config_groups": {"group_0": group},
    }
    return stored(merged, folder, section)


def has_quant_fp8(folder: Path, **options: Any) -> bool:
    return "+quant_fp8" in configure(folder, **options).compilation_config.custom_ops


def fuses_activations(folder: Path, asked: JsonObject | None = None, **options: Any) -> bool:
    """Whether vLLM fuses activations and their quantisation where Inductor may fuse all that it can."""
    compilation = {"custom_ops": ["none"], "pass_config": asked or {}}
    found = configure(folder, compilation_config=compilation, **options)
    return bool(found.compilation_config.pass_config.fuse_act_quant)


def test_blocks_of_fp8_are_quantised_by_the_operator_that_vllm_takes_for_them(merged, tmp_path):
    own = stored(merged, tmp_path / "own", BLOCK_FP8, architectures=["LlamaForCausalLM"])
    blocks = with_variant(merged, tmp_path / "blocks", **BLOCKS)
    assert has_quant_fp8(own) and has_quant_fp8(blocks, **flexquant(policy="phase"))
    assert not has_quant_fp8(merged, **flexquant(policy="phase"))


def test_activations_are_fused_as_for_a_checkpoint_in_nvfp4(merged, tmp_path):
    fp4 = {"format": "nvfp4-pack-quantized", "weights": FP4, "input_activations": {**FP4, "dynamic": "local"}}
    variant = with_variant(merged, tmp_path / "fp4", **fp4)
    section = json.loads((variant / "config.json").read_text())["quantization_config"]["variants"]["w8a8"]
    own = stored(merged, tmp_path / "own", section["quantization_config"], architectures=["LlamaForCausalLM"])
    assert fuses_activations(own) and fuses_activations(variant, **flexquant(policy="phase"))
    assert not fuses_activations(merged, **flexquant(policy="phase"))
    assert not fuses_activations(variant, **flexquant(policy="w4a16")), "nothing is served in NVFP4"
    assert not fuses_activations(variant, {"fuse_act_quant": False}, **flexquant(policy="phase"))
    assert not fuses_activations(variant, **flexquant(policy="phase"), optimization_level=0)
