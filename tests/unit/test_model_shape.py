# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The shapes read from checkpoints: bytes, schemes, experts, sliding windows, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexquant.checkpoint.safetensors_io import TensorRef
from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints
from flexquant.planning.device import MARLIN, Device, load_device
from flexquant.planning.linears import Linear, LinearReader
from flexquant.planning.model_shape import read_model_shape
from flexquant.planning.roofline import linear_cost
from flexquant.policy.rules import load_policy
from tests.checkpoints import make_checkpoint
from tests.prediction import predict_pass_times, run_predict

W4A8, ONE_COPY = (load_policy(name).derived for name in ("w4a8", "one-copy"))


def test_shape_of_a_merged_checkpoint(merged: Path) -> None:
    model = read_model_shape(merged)
    # hidden 128, intermediate 256, 4 heads and 2 KV heads of 32; scales bf16, one a channel or a group of 64;
    # weight_shape takes 16 bytes a matrix
    assert model.linears["w8a8"] == {
        Linear(256, 128, 256 * 128 + 2 * 256, "w8a8"): 2,
        Linear(128, 128, 128 * 128 + 2 * 128, "w8a8"): 2,
        Linear(512, 128, 512 * 128 + 2 * 512, "w8a8"): 2,
        Linear(128, 256, 128 * 256 + 2 * 128, "w8a8"): 2,
    }
    assert Linear(512, 128, 512 * 128 / 2 + 2 * 512 * 2 + 32, "w4a16") in model.linears["w4a16"]
    assert model.head == Linear(320, 128, 2 * 320 * 128, "bf16")
    assert model.kv_bytes_per_token == 2 * 2 * 2 * 32 * 2
    assert model.attention_flops == 2 * 4 * 128
    stored = sum(file.stat().st_size for file in merged.glob("*.safetensors"))
    assert 0.9 * stored < model.resident_bytes < stored
    half = read_model_shape(merged, 2)
    assert half.resident_bytes == model.resident_bytes / 2
    assert half.kv_bytes_per_token == model.kv_bytes_per_token / 2
    assert Linear(128, 128, (256 * 128 + 2 * 256) / 2, "w8a8") in half.linears["w8a8"]


def test_tied_head_reads_the_embedding(merged_fp8: Path) -> None:
    model = read_model_shape(merged_fp8)
    assert model.head == Linear(320, 128, 2 * 320 * 128, "bf16")
    assert {linear.scheme for linear in model.linears["fp8"]} == {"fp8"}


def test_w4a8_is_derived_from_w4a16(merged: Path, tmp_path: Path) -> None:
    plain, model = read_model_shape(merged), read_model_shape(merged, derived=W4A8)
    assert model.variants == ("w8a8", "w4a16", "w4a8")
    assert {linear.scheme for linear in model.linears["w4a8"]} == {"w4a8"}
    assert model.resident_bytes == plain.resident_bytes + plain.own_bytes["w4a16"]
    merge_checkpoints({"w8a8": make_checkpoint(tmp_path / "w8a8")}, tmp_path / "merged")
    with pytest.raises(FlexQuantError, match="the variants w8a8: there is no 'w4a16' with INT4 weights"):
        read_model_shape(tmp_path / "merged", derived=W4A8)


def test_int8_computed_from_int4_is_no_second_copy(merged: Path) -> None:
    plain, model = read_model_shape(merged), read_model_shape(merged, derived=ONE_COPY)
    assert model.variants == ("w8a8", "w4a16", "w8a8-from-int4")
    stored = 512 * 128 / 2 + 2 * 512 * 2 + 32
    assert Linear(512, 128, 512 * 128, "w8a8", source_bytes=stored) in model.linears["w8a8-from-int4"]
    assert sum(model.linears["w8a8-from-int4"].values()) == sum(model.linears["w4a16"].values())
    # It needs its source's weights, and memory for the largest linear.
    for variants in (["w8a8-from-int4"], ["w4a16", "w8a8-from-int4"]):
        assert model.bytes_of(variants) == plain.bytes_of(["w4a16"]) + 512 * 128
    half = read_model_shape(merged, 2, ONE_COPY)
    assert half.own_bytes["w8a8-from-int4"] == 512 * 128 / 2


def test_marlin_runs_what_one_copy_reads_and_experts(merged: Path) -> None:
    """vLLM prefers Machete on Hopper, which packs weights in another way and has no kernel for experts."""
    plain, model = read_model_shape(merged), read_model_shape(merged, derived={**ONE_COPY, **W4A8})
    marlin = {replace(linear, scheme=MARLIN): n for linear, n in plain.linears["w4a16"].items()}
    assert model.linears["w4a16"] == marlin
    assert model.linears["w4a8"] == read_model_shape(merged, derived=W4A8).linears["w4a8"]
    assert load_device("h100").kernel(MARLIN) != load_device("h100").kernel("w4a16")
    assert load_device("l20").kernel(MARLIN) == load_device("l20").kernel("w4a16")
    expert = Linear(64, 16, 600, "w4a16", experts=4, active_experts=2)
    in_marlin = replace(expert, scheme=MARLIN)
    assert linear_cost(expert, 512, load_device("h100")) == linear_cost(in_marlin, 512, load_device("h100"))


def test_experts_of_one_copy_stay_in_int4() -> None:
    derivation = ONE_COPY["w8a8-from-int4"]
    expert = Linear(64, 16, 600, "w4a16", experts=4, active_experts=2)
    assert expert.derived(derivation) == expert
    assert replace(expert, experts=1, active_experts=1).derived(derivation).scheme == "w8a8"
    assert replace(expert, scheme="bf16", experts=1).derived(derivation).scheme == "bf16"


def tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, TensorRef]:
    return {
        name: TensorRef(name, "BF16", shape, Path("model.safetensors"), 0, 2 * math.prod(shape))
        for name, shape in shapes.items()
    }


def test_experts_are_counted_as_one_call() -> None:
    shapes: dict[str, tuple[int, ...]] = {"model.layers.0.mlp.gate.weight": (4, 16)}
    for i in range(4):
        for part, shape in (("gate", (32, 16)), ("up", (32, 16)), ("down", (16, 32))):
            shapes[f"model.layers.0.mlp.experts.{i}.{part}_proj.weight"] = shape
    section = {"quant_method": "compressed-tensors", "config_groups": {}}
    assert LinearReader(tensors(shapes), section, "here").decoder_linears() == {
        "model.layers.0.mlp.gate": Linear(4, 16, 2 * 4 * 16, "bf16"),
        "model.layers.0.mlp.experts.gate_up_proj": Linear(64, 16, 2 * 64 * 16, "bf16", experts=4),
        "model.layers.0.mlp.experts.down_proj": Linear(16, 32, 2 * 16 * 32, "bf16", experts=4),
    }


@pytest.mark.parametrize("tower", ["vision_tower.encoder", "visual", "audio_tower", "mtp"])
def test_layers_of_other_towers_are_left_out(tower: str) -> None:
    names = ["language_model.model.layers.0.mlp.up_proj.weight", f"{tower}.layers.0.mlp.up_proj.weight"]
    section = {"quant_method": "compressed-tensors", "config_groups": {}}
    reader = LinearReader(tensors(dict.fromkeys(names, (32, 16))), section, "here")
    assert reader.decoder_linears() == {
        "language_model.model.layers.0.mlp.gate_up_proj": Linear(32, 16, 2 * 32 * 16, "bf16")
    }


def test_unknown_schemes_are_refused() -> None:
    shapes = {"layers.0.up_proj.weight": (32, 16), "layers.0.up_proj.weight_scale": (32, 1)}
    group = {"targets": ["Linear"], "weights": {"num_bits": 8}, "input_activations": {"num_bits": 4}}
    section = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    with pytest.raises(
        FlexQuantError, match="here: 'layers.0.up_proj' has 8-bit int weights and 4-bit int act"
    ):
        LinearReader(tensors(shapes), section, "here").decoder_linears()
    with pytest.raises(FlexQuantError, match="is stored quantised, but no config group quantises it"):
        LinearReader(tensors(shapes), {**section, "ignore": ["re:.*"]}, "here").decoder_linears()
    with pytest.raises(FlexQuantError, match="not understood .*; quantise the model again"):
        LinearReader(tensors(shapes), {"config_groups": 8}, "here")
    with pytest.raises(FlexQuantError, match="here has no linear weights in decoder layers"):
        LinearReader(tensors({"embed.weight": (4, 4)}), section, "here").decoder_linears()


def weight_only(bits: int) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(("bits", "scheme"), [(4, "w4a16"), (8, "w8a16")])
def test_weight_only_schemes(device: Device, bits: int, scheme: str) -> None:
    shapes = {"layers.0.up_proj.weight": (32, 16), "layers.0.up_proj.weight_scale": (32, 1)}
    (linear,) = LinearReader(tensors(shapes), weight_only(bits), "here").decoder_linears().values()
    assert linear.scheme == scheme
    assert device.kernel(scheme) == device.kernels["w4a16"]


def test_w4a8_is_not_derived_from_8_bit_weights(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "w8a16", scheme="fp8")
    config = json.loads((checkpoint / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        del group["input_activations"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    merge_checkpoints({"w8a16": checkpoint}, tmp_path / "merged")
    assert predict_pass_times(tmp_path / "merged", "a100").variants == ("w8a16",)
    with pytest.raises(FlexQuantError, match="the variants w8a16: there is no 'w4a16' with INT4 weights"):
        read_model_shape(tmp_path / "merged", derived=W4A8)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, False),
        ({"sliding_window": None}, False),
        ({"sliding_window": 4096}, True),
        ({"sliding_window": 4096, "use_sliding_window": False}, False),
        ({"sliding_window": 4096, "layer_types": ["full_attention"] * 2}, False),
        ({"sliding_window": 4096, "layer_types": ["full_attention", "sliding_attention"]}, True),
    ],
)
def test_sliding_windows_are_told(
    capsys: pytest.CaptureFixture[str],
    merged: Path,
    tmp_path: Path,
    only_predict: None,
    config: dict[str, Any],
    expected: bool,
) -> None:
    for file in merged.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    before = json.loads((merged / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**before, **config}))
    text, result = run_predict(capsys, str(tmp_path), "--device", "h100")
    assert ("note: layers with a sliding window" in text) == result["has_sliding_window"] == expected


def test_layers_left_in_16_bit_are_bf16(tmp_path: Path) -> None:
    sources = {name: make_checkpoint(tmp_path / name, scheme=name) for name in ("w8a8", "w4a16")}
    plain = make_checkpoint(tmp_path / "bf16", scheme=None)
    section = json.loads((sources["w8a8"] / "config.json").read_text())["quantization_config"]
    config = json.loads((plain / "config.json").read_text())
    section["ignore"].append(r"re:.*_proj$")
    (plain / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    merge_checkpoints({"w8a8": plain, "w4a16": sources["w4a16"]}, tmp_path / "merged")
    model = read_model_shape(tmp_path / "merged")
    assert Linear(512, 128, 2 * 512 * 128, "bf16") in model.linears["w8a8"]


def test_heads_that_cannot_be_shared_are_refused(merged: Path) -> None:
    with pytest.raises(
        FlexQuantError, match="4 attention heads and 2 KV heads, which 3 devices cannot share"
    ):
        read_model_shape(merged, 3)


def test_config_without_sizes_is_refused(merged: Path, tmp_path: Path) -> None:
    for file in merged.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((merged / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": None}))
    with pytest.raises(FlexQuantError, match="does not describe a llama model .*vocab_size"):
        read_model_shape(tmp_path)


def test_a_model_that_transformers_does_not_know_is_read_by_the_usual_names(
    merged: Path, tmp_path: Path
) -> None:
    for file in merged.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((merged / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "of_its_own"}))
    assert read_model_shape(tmp_path, 2) == read_model_shape(merged, 2)
    absurd = {**config, "model_type": "of_its_own", "num_key_value_heads": True}
    (tmp_path / "config.json").write_text(json.dumps(absurd))
    with pytest.raises(FlexQuantError, match=r"/config\.json has num_key_value_heads True, expected a whole"):
        read_model_shape(tmp_path)


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    variants = {name: make_checkpoint(tmp_path / name, "deepseek_v2", name) for name in ("w8a8", "w4a16")}
    merge_checkpoints(variants, tmp_path / "merged")
    with pytest.raises(FlexQuantError, match="multi-head latent attention, and passes of such"):
        read_model_shape(tmp_path / "merged")


def test_a_device_holds_one_kv_head_at_least(merged: Path) -> None:
    """Four devices hold two KV heads: one each, twice over."""
    assert read_model_shape(merged, 4).kv_bytes_per_token == read_model_shape(merged, 2).kv_bytes_per_token
