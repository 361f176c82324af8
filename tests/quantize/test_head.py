# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""`--head int8` stores the lm_head in INT8, rounded once for all variants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flexquant import cli
from flexquant.checkpoint.merged_config import read_merged_config
from flexquant.errors import FlexQuantError
from tests.checkpoints import StateDict, make_checkpoint
from tests.foreign import tensors_of
from tests.quantize.quantizing import OPTIONS, RTN, quantize, recipe

HEAD = "lm_head"
WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}


def with_an_unused_row(state: StateDict) -> StateDict:
    state[f"{HEAD}.weight"][7] = 0
    return state


@pytest.mark.parametrize("by", ["rtn", "default"])
def test_build_stores_it_once(by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_checkpoint(tmp_path / "model", scheme=None, num_layers=1, transform=with_an_unused_row)
    asked = ["build", str(model), "--output", str(tmp_path / "merged"), "--recipe", by, "--head", "int8"]
    assert cli.main([*asked, *OPTIONS, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    tensors = tensors_of(tmp_path / "merged")
    packed, scale = tensors[f"shared.{HEAD}.weight_packed"], tensors[f"shared.{HEAD}.weight_scale"].float()
    integers = (packed[..., None] >> torch.arange(0, 32, 8) & 255).flatten(1) - 128
    exact = load_file(model / "model.safetensors")[f"{HEAD}.weight"].float()
    # A scale in bfloat16 puts the largest weight of a row up to 0.8 steps beside its integer.
    assert ((integers * scale - exact).abs() <= 0.8 * scale).all() and (integers[7] == 0).all()
    assert (integers.abs().amax(1)[8:] >= 126).all()
    merged, _ = read_merged_config(tmp_path / "merged")
    assert HEAD in merged.shared_modules
    for name, variant in merged.variants.items():
        section = variant.quantization_config
        (group,) = (g for g in section["config_groups"].values() if HEAD in str(g["targets"]))
        assert group["weights"].items() >= WEIGHTS.items() and HEAD not in section["ignore"]
        assert (group["format"], group["input_activations"]) == ("pack-quantized", None)
        assert result["variants"][name]["losses"]
    again = quantize(model, tmp_path / "again", str(tmp_path / "merged-variants" / "w8a8" / "recipe.yaml"))
    assert tensors_of(Path(again[0].folder))[f"{HEAD}.weight_packed"].equal(packed)


@pytest.mark.parametrize(
    ("options", "by", "said"),
    [
        ({"tie_word_embeddings": True}, RTN | {"head": "int8"}, "serve with a policy that has 'head: int8'"),
        ({}, RTN | {"head": "int4"}, "give one of stored, int8"),
        ({}, {"QuantizationModifier": {"scheme": "W8A8"}}, "'head: int8' beside the modifiers"),
    ],
)
def test_what_is_refused(options: dict[str, Any], by: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", scheme=None, num_layers=1, **options)
    with pytest.raises(FlexQuantError, match=said):
        quantize(model, tmp_path / "output", recipe(w8a8=by))
    assert not (tmp_path / "output").exists()
