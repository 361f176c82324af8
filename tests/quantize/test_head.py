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
from flexquant.errors import FlexQuantError
from flexquant.merge import MergedCheckpoint
from tests.checkpoints import StateDict, make_checkpoint
from tests.quantize.quantizing import OPTIONS, RTN, W4A16, quantize, recipe, report, section

HEAD = "lm_head"


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def with_an_unused_row(state: StateDict) -> StateDict:
        state[f"{HEAD}.weight"][7] = 0
        return state

    folder = tmp_path_factory.mktemp("untied") / "model"
    return make_checkpoint(folder, scheme=None, num_layers=1, transform=with_an_unused_row)


def integers_and_scales(folder: Path, prefix: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    tensors: StateDict = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    packed = tensors[f"{prefix}{HEAD}.weight_packed"]
    integers = (packed[..., None] >> torch.arange(0, 32, 8) & 255).flatten(1) - 128
    return integers, tensors[f"{prefix}{HEAD}.weight_scale"].float()


@pytest.mark.parametrize("by", ["rtn", "default"])
def test_build_stores_it_once(
    by: str, untied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["build", str(untied), "--output", str(tmp_path / "merged"), "--recipe", by, "--head", "int8"]
    assert cli.main([*asked, *OPTIONS, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    integers, scale = integers_and_scales(tmp_path / "merged", "shared.")
    exact = load_file(untied / "model.safetensors")[f"{HEAD}.weight"].float()
    assert ((integers * scale - exact).abs() <= 0.51 * scale).all() and (integers[7] == 0).all()
    assert integers.abs().amax(1)[8:].eq(127).float().mean() > 0.9
    merged = MergedCheckpoint.open(tmp_path / "merged").merged
    assert HEAD in merged.shared_modules
    for name, variant in merged.variants.items():
        groups = variant.quantization_config["config_groups"].values()
        (group,) = (group for group in groups if any(HEAD in target for target in group["targets"]))
        weights = {key: group["weights"][key] for key in ("num_bits", "type", "strategy", "symmetric")}
        assert weights == {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
        assert (group["format"], group["input_activations"]) == ("pack-quantized", None)
        assert HEAD not in variant.quantization_config["ignore"]
        assert result["variants"][name]["losses"]
    written = tmp_path / "merged-variants" / "w8a8" / "recipe.yaml"
    again = quantize(untied, tmp_path / "again", str(written))
    assert integers_and_scales(Path(again[0].folder))[0].equal(integers)


def test_one_variant_can_have_it_alone_and_what_is_lost_is_with_it(untied: Path, tmp_path: Path) -> None:
    found = {}
    for name, head in (("stored", "stored"), ("rounded", "int8")):
        found[name] = quantize(untied, tmp_path / name, recipe(w8a8=RTN | {"head": head}))[0]
    assert [report(tmp_path / name / "w8a8")["quantized_linears"] for name in found] == [7, 8]
    assert len(section(tmp_path / "stored" / "w8a8")["config_groups"]) == 1
    losses: Any = {name: {kind: loss.kl for kind, loss in v.losses.items()} for name, v in found.items()}
    assert losses["stored"] != losses["rounded"]


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
        quantize(model, tmp_path / "output", recipe(w8a8=by, w4a16=W4A16))
    assert not (tmp_path / "output").exists()
