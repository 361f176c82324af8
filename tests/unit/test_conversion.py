# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Checkpoints in the formats of GPTQ and AWQ become those of compressed-tensors, value by value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexquant.checkpoint.folder import read_tensors
from flexquant.checkpoint.safetensors_io import load_tensor
from flexquant.errors import FlexQuantError
from flexquant.merge import convert_checkpoint, merge_checkpoints
from tests.checkpoints import make_checkpoint
from tests.foreign import awq_tensors, gptq_tensors, unpacked, write_foreign


@pytest.fixture(scope="module")
def w4a16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "w4a16", scheme="w4a16")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {key: load_tensor(ref) for key, ref in read_tensors(folder).items()}


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
def test_gptq_gives_the_same_tensors_back(form: str, w4a16: Path, tmp_path: Path) -> None:
    foreign = write_foreign(w4a16, tmp_path / "gptq", "gptq", checkpoint_format=form)
    result = convert_checkpoint(foreign, tmp_path / "converted")
    assert_equal(tensors_of(tmp_path / "converted"), tensors_of(w4a16))
    assert result == {"output": str(tmp_path / "converted"), "from": "gptq", "linears": 2 * 7}
    weights = config_of(tmp_path / "converted")["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["symmetric"], weights["group_size"]) == (4, True, 64)
    assert config_of(tmp_path / "converted")["quantization_config"]["ignore"] == ["lm_head"]


@pytest.mark.parametrize(
    ("method", "settings", "format_tensors", "dtype"),
    [("awq", {}, awq_tensors, torch.float16), ("gptq", {"sym": False}, gptq_tensors, torch.bfloat16)],
)
def test_values_scales_and_zero_points_are_kept(
    method: str, settings: Any, format_tensors: Any, dtype: torch.dtype, w4a16: Path, tmp_path: Path
) -> None:
    foreign = write_foreign(w4a16, tmp_path / method, method, **settings)
    module = "model.layers.1.mlp.down_proj"
    file = foreign / "model.safetensors"
    state = load_file(file)
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 16, (128, 256), generator=generator)
    zeros = torch.randint(0, 16, (128, 4), generator=generator)
    scales = torch.rand((128, 4), generator=generator).to(dtype)
    state |= {f"{module}.{part}": tensor for part, tensor in format_tensors(values, zeros, scales).items()}
    save_file(state, file, metadata={"format": "pt"})

    convert_checkpoint(foreign, tmp_path / "converted")
    found = unpacked(tensors_of(tmp_path / "converted"), module)
    for tensor, expected in zip(found, (values, zeros, scales), strict=True):
        assert torch.equal(tensor.to(expected.dtype), expected)


def test_another_dtype_is_asked_for_where_the_variants_differ(w4a16: Path, tmp_path: Path) -> None:
    half = make_checkpoint(tmp_path / "half", scheme="w4a16")
    file = half / "model.safetensors"
    tensors = {k: t.half() if t.dtype is torch.bfloat16 else t for k, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    (half / "config.json").write_text(json.dumps(config_of(half) | {"dtype": "float16"}))
    foreign = write_foreign(half, tmp_path / "gptq", "gptq")
    w8a8 = make_checkpoint(tmp_path / "w8a8")

    convert_checkpoint(foreign, tmp_path / "converted", dtype="bfloat16")
    assert config_of(tmp_path / "converted")["dtype"] == "bfloat16"
    rounded = {
        key: tensor.half().bfloat16() if tensor.dtype is torch.bfloat16 else tensor
        for key, tensor in tensors_of(w4a16).items()
    }
    assert_equal(tensors_of(tmp_path / "converted"), rounded)
    merge_checkpoints({"w8a8": w8a8, "w4a16": tmp_path / "converted"}, tmp_path / "merged")


def reorder(state: dict[str, torch.Tensor]) -> None:
    key = "model.layers.1.self_attn.o_proj.g_idx"
    state[key] = state[key].flip(0)


def shift_a_zero(state: dict[str, torch.Tensor]) -> None:
    state["model.layers.0.self_attn.k_proj.qzeros"] += 1


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        ({"bits": 3}, None, "3 bits"),
        ({"dynamic": {"-:.*down_proj": {}}}, None, "dynamic"),
        ({"desc_act": True}, reorder, r"layers\.1\.self_attn\.o_proj .*desc_act"),
        ({}, shift_a_zero, r"layers\.0\.self_attn\.k_proj has zero points"),
        ({"quant_method": "squeezellm"}, None, "squeezellm"),
        ({"quant_method": "compressed-tensors"}, None, "already"),
        ({"quant_method": "awq", "version": "gemv"}, None, "GEMM"),
    ],
)
def test_what_cannot_be_converted_leaves_nothing(
    settings: dict[str, Any], change: Any, message: str, w4a16: Path, tmp_path: Path
) -> None:
    foreign = write_foreign(w4a16, tmp_path / "foreign", "gptq", **settings)
    if change:
        file = foreign / "model.safetensors"
        change(state := load_file(file))
        save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(FlexQuantError, match=message):
        convert_checkpoint(foreign, tmp_path / "converted")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign"]


def test_merging_says_how_to_convert(w4a16: Path, tmp_path: Path) -> None:
    foreign = write_foreign(w4a16, tmp_path / "gptq", "gptq")
    w8a8 = make_checkpoint(tmp_path / "w8a8")
    with pytest.raises(FlexQuantError, match="flexquant convert"):
        merge_checkpoints({"w8a8": w8a8, "w4a16": foreign}, tmp_path / "merged")
