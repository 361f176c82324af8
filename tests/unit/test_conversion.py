# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Checkpoints in the formats of GPTQ and AWQ become those of compressed-tensors, value by value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexquant.checkpoint.folder import read_tensors
from flexquant.checkpoint.safetensors_io import load_tensor
from flexquant.errors import FlexQuantError
from flexquant.merge import convert_checkpoint, merge_checkpoints, split_checkpoint, verify_checkpoint
from flexquant.merge.formats import open_source
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


def without_g_idx(state: dict[str, torch.Tensor]) -> None:
    for key in [key for key in state if key.endswith(".g_idx")]:
        del state[key]


def rewrite(foreign: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = foreign / "model.safetensors"
    change(state := load_file(file))
    save_file(state, file, metadata={"format": "pt"})


def test_without_g_idx_inputs_are_in_order(w4a16: Path, tmp_path: Path) -> None:
    foreign = write_foreign(w4a16, tmp_path / "gptq", "gptq")
    rewrite(foreign, without_g_idx)
    convert_checkpoint(foreign, tmp_path / "converted")
    assert_equal(tensors_of(tmp_path / "converted"), tensors_of(w4a16))


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_what_is_left_in_16_bit_is_found_in_the_tensors(method: str, w4a16: Path, tmp_path: Path) -> None:
    """A name to leave out may be a part of other names, as AutoAWQ has it."""
    settings = {"modules_to_not_convert": ["gate"]} if method == "awq" else {}
    foreign = write_foreign(w4a16, tmp_path / method, method, **settings)
    left = "model.layers.0.mlp.gate"

    def add_a_router(state: dict[str, torch.Tensor]) -> None:
        state[f"{left}.weight"] = torch.zeros(4, 128, dtype=torch.bfloat16)

    rewrite(foreign, add_a_router)
    assert convert_checkpoint(foreign, tmp_path / "converted")["linears"] == 2 * 7
    section = config_of(tmp_path / "converted")["quantization_config"]
    assert sorted(section["ignore"]) == ["lm_head", left]
    packed = {key for key in tensors_of(tmp_path / "converted") if key.endswith(".weight_packed")}
    assert packed == {key for key in tensors_of(w4a16) if key.endswith(".weight_packed")}


def test_files_that_a_variant_needs_are_taken_along_and_no_others(w4a16: Path, tmp_path: Path) -> None:
    foreign = write_foreign(w4a16, tmp_path / "gptq", "gptq")
    needed = ("tekken.json", "chat_template.jinja", "LICENSE", "generation_config.json")
    others = (".git/objects/pack/a", "original/consolidated.00.pth", "quantize_config.json", "model.bin")
    for name in (*needed, *others):
        (foreign / name).parent.mkdir(parents=True, exist_ok=True)
        (foreign / name).write_text("{}")
    convert_checkpoint(foreign, tmp_path / "converted")
    found = {p.relative_to(tmp_path / "converted").as_posix() for p in (tmp_path / "converted").rglob("*")}
    written = {"config.json", "model.safetensors"}
    assert found == written | {*needed, "tokenizer.json", "tokenizer_config.json"}


def reorder(state: dict[str, torch.Tensor]) -> None:
    key = "model.layers.1.self_attn.o_proj.g_idx"
    state[key] = state[key].flip(0)


def shift_a_zero(state: dict[str, torch.Tensor]) -> None:
    state["model.layers.0.self_attn.k_proj.qzeros"] += 1


def quantise_the_head(state: dict[str, torch.Tensor]) -> None:
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        if (key := f"model.layers.0.mlp.up_proj.{part}") in state:
            state[f"lm_head.{part}"] = state[key].clone()
    del state["lm_head.weight"]


def pack_for_marlin(state: dict[str, torch.Tensor]) -> None:
    for key in [key for key in state if key.endswith(".qweight")]:
        state[f"{key.removesuffix('qweight')}B"] = state.pop(key)


def lose(key: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(state: dict[str, torch.Tensor]) -> None:
        del state[key]

    return change


def cut(key: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(state: dict[str, torch.Tensor]) -> None:
        state[key] = state[key][:-1].clone()

    return change


def widen(state: dict[str, torch.Tensor]) -> None:
    key = "model.layers.0.mlp.up_proj.qweight"
    state[key] = state[key].long()


UP = "model.layers.0.mlp.up_proj"
AWQ = {"quant_method": "awq"}


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        ({"bits": 3}, None, "3 bits"),
        ({"dynamic": {"-:.*down_proj": {}, "+:.*up_proj": {"bits": 8}}}, None, "dynamic"),
        ({"desc_act": True}, reorder, r"layers\.1\.self_attn\.o_proj .*desc_act"),
        ({}, shift_a_zero, r"layers\.0\.self_attn\.k_proj has zero points"),
        ({"quant_method": "squeezellm"}, None, "squeezellm"),
        ({"quant_method": "compressed-tensors"}, None, "already"),
        ({**AWQ, "version": "gemv"}, None, "GEMM"),
        ({"lm_head": True}, quantise_the_head, "lm_head quantised"),
        (AWQ, quantise_the_head, "lm_head quantised"),
        ({"checkpoint_format": "marlin"}, pack_for_marlin, "'marlin'"),
        ({"is_marlin_format": True}, pack_for_marlin, "no linear"),
        (AWQ, pack_for_marlin, "no linear"),
        ({"desc_act": True}, without_g_idx, "desc_act"),
        ({"sym": False}, lose(f"{UP}.qzeros"), rf"{UP}.qzeros is missing"),
        (AWQ, lose(f"{UP}.scales"), rf"{UP}.scales is missing"),
        ({}, cut(f"{UP}.scales"), rf"{UP}.scales is BF16 \[1, 256\]"),
        (AWQ, cut(f"{UP}.qzeros"), rf"{UP}.qzeros is I32 \[1, 32\] instead of I32 \[2, 32\]"),
        ({}, cut(f"{UP}.g_idx"), rf"{UP}.g_idx is I32 \[127\]"),
        ({}, widen, rf"{UP}.qweight is I64"),
        ({**AWQ, "group_size": -1}, None, "group_size"),
        ({"group_size": "64"}, None, "group_size"),
    ],
)
def test_what_cannot_be_converted_leaves_nothing(
    settings: dict[str, Any], change: Any, message: str, w4a16: Path, tmp_path: Path
) -> None:
    method = "awq" if settings.get("quant_method") == "awq" else "gptq"
    foreign = write_foreign(w4a16, tmp_path / "foreign", method, **settings)
    if change:
        rewrite(foreign, change)
    with pytest.raises(FlexQuantError, match=message):
        convert_checkpoint(foreign, tmp_path / "converted")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign"]


EIGHT_MIDDLES = -0x77777778
"""A word of eight zero points in the middle, 8, without an offset."""
AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "data_type": "int"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**AUTO_ROUND, "packing_format": "auto_round:fp8"}, "packing_format auto_round:fp8"),
        ({**AUTO_ROUND, "sym": False}, "sym False"),
        (
            {**AUTO_ROUND, "extra_config": {"model.layers.0.mlp.up_proj": {"bits": 2}}},
            "1 layers with settings of their own",
        ),
        ({**AUTO_ROUND, "data_type": "mx_fp"}, "data_type mx_fp"),
    ],
)
def test_what_vllm_does_not_serve_of_auto_round_is_refused(settings, message, w4a16, tmp_path):
    foreign = write_foreign(w4a16, tmp_path / "foreign", "gptq", **settings)
    with pytest.raises(FlexQuantError, match=message):
        open_source("w4a16", foreign)


def settings_in(name: str, **renamed: str) -> Callable[[Path], None]:
    """Return a function that moves a checkpoint's settings into a file of their own, under other names."""

    def move(folder: Path) -> None:
        config = config_of(folder)
        section = config.pop("quantization_config")
        section.pop("quant_method")
        (folder / name).write_text(json.dumps({renamed.get(key, key): v for key, v in section.items()}))
        (folder / "config.json").write_text(json.dumps(config))

    return move


def rename_the_file(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-64g.safetensors")


def stored_minus_one(folder: Path) -> None:
    def change(state: dict[str, torch.Tensor]) -> None:
        for key in [key for key in state if key.endswith("qzeros")]:
            state[key] = state[key].fill_(
                -0x77777778
            )  # eight times 8, as releases without the offset store it

    rewrite(folder, change)


PUBLISHED = {
    "gptq": ("gptq", {}, None),
    "awq": ("awq", {"version": "GEMM", "modules_to_not_convert": ["gate"]}, None),
    "gptq v2": ("gptq", {"checkpoint_format": "gptq_v2"}, None),
    "gptq with layers left out": ("gptq", {"dynamic": {"-:.*lm_head": {}}}, None),
    "AutoGPTQ's settings file": ("gptq", {}, settings_in("quantize_config.json")),
    "AutoAWQ's settings file": (
        "awq",
        {"version": "GEMM"},
        settings_in("quant_config.json", bits="w_bit", group_size="q_group_size"),
    ),
    "AutoGPTQ's file name": ("gptq", {}, rename_the_file),
    "AutoRound": ("gptq", AUTO_ROUND, None),
    "AutoRound without the offset": ("gptq", AUTO_ROUND, stored_minus_one),
    "AutoRound as AWQ": (
        "awq",
        {"quant_method": "intel/auto-round", "packing_format": "auto_round:auto_awq", "sym": False},
        None,
    ),
}


@pytest.mark.parametrize("case", PUBLISHED)
def test_a_merge_reads_what_others_published(case: str, w4a16: Path, tmp_path: Path) -> None:
    method, settings, edit = PUBLISHED[case]
    foreign = write_foreign(w4a16, tmp_path / "foreign", method, **settings)
    if edit:
        edit(foreign)
    sources = {"w8a8": make_checkpoint(tmp_path / "w8a8"), "w4a16": foreign}
    merge_checkpoints(sources, tmp_path / "merged")
    verify_checkpoint(tmp_path / "merged", sources)
    split_checkpoint(tmp_path / "merged", "w4a16", tmp_path / "split")
    found, expected = tensors_of(tmp_path / "split"), tensors_of(w4a16)
    if method == "awq":  # it has zero points, all in the middle
        zero_points = [key for key in found if key.endswith("weight_zero_point")]
        assert len(zero_points) == 2 * 7
        assert all(bool((found.pop(key) == EIGHT_MIDDLES).all()) for key in zero_points)
    assert_equal(found, expected)


def prefill_by(variant: str, folder: Path) -> str:
    """Write a policy that decodes by W4A16 and does all else by another variant; return its path."""
    file = folder / "policy.yaml"
    rules = [{"when": {"phase": "decode"}, "use": "w4a16"}, {"use": variant}]
    file.write_text(json.dumps({"schema": "flexquant.policy/v1", "rules": rules}))
    return str(file)


def test_block_fp8_keeps_every_byte(tmp_path: Path) -> None:
    fp8 = make_checkpoint(tmp_path / "fp8", scheme=None)

    def quantise(state: dict[str, torch.Tensor]) -> None:
        for key in [key for key in state if key.endswith("_proj.weight")]:
            blocks = state[key].float().unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
            scale = blocks.abs().amax((1, 3)) / 448
            state[key] = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
            state[f"{key}_scale_inv"] = scale

    rewrite(fp8, quantise)
    section = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    (fp8 / "config.json").write_text(json.dumps(config_of(fp8) | {"quantization_config": section}))
    sources = {"fp8": fp8, "w4a16": make_checkpoint(tmp_path / "w4a16", scheme="w4a16")}
    merge_checkpoints(sources, tmp_path / "merged", policy=prefill_by("fp8", tmp_path))
    verify_checkpoint(tmp_path / "merged", sources)
    split_checkpoint(tmp_path / "merged", "fp8", tmp_path / "split")
    renamed = {k.replace("_scale_inv", "_scale"): t.view(torch.uint8) for k, t in tensors_of(fp8).items()}
    assert_equal({k: t.view(torch.uint8) for k, t in tensors_of(tmp_path / "split").items()}, renamed)

    for wrong in ({"weight_block_size": None}, {"activation_scheme": "static"}):
        (fp8 / "config.json").write_text(
            json.dumps(config_of(fp8) | {"quantization_config": section | wrong})
        )
        with pytest.raises(FlexQuantError, match="only blocks with dynamic activations"):
            open_source("fp8", fp8)


def test_a_model_in_16_bit_is_a_variant(w4a16: Path, tmp_path: Path) -> None:
    sources = {"bf16": make_checkpoint(tmp_path / "bf16", scheme=None), "w4a16": w4a16}
    report = merge_checkpoints(sources, tmp_path / "merged", policy=prefill_by("bf16", tmp_path))
    assert report.variants["bf16"].bits_per_parameter == pytest.approx(16, rel=0.01)
    verify_checkpoint(tmp_path / "merged", sources)


def in_half(folder: Path) -> Path:
    rewrite(
        folder,
        lambda state: state.update(
            {key: tensor.half() for key, tensor in state.items() if tensor.dtype is torch.bfloat16}
        ),
    )
    (folder / "config.json").write_text(json.dumps(config_of(folder) | {"dtype": "float16"}))
    return folder


def test_two_dtypes_are_merged_if_one_is_named(w4a16: Path, tmp_path: Path) -> None:
    sources = {"w8a8": make_checkpoint(tmp_path / "w8a8"), "w4a16": tmp_path / "half"}
    in_half(write_foreign(w4a16, tmp_path / "half", "gptq"))
    with pytest.raises(FlexQuantError, match="dtype: 'bfloat16' against 'float16'.*--dtype bfloat16"):
        merge_checkpoints(sources, tmp_path / "merged")
    for dtype in ("bfloat16", "float16"):
        merge_checkpoints(sources, tmp_path / dtype, dtype=dtype)
        verify_checkpoint(tmp_path / dtype, sources)
        merged = tensors_of(tmp_path / dtype)
        assert merged["shared.model.norm.weight"].dtype is getattr(torch, dtype)
        assert merged["w4a16.model.layers.0.mlp.up_proj.weight_scale"].dtype is getattr(torch, dtype)
        assert config_of(tmp_path / dtype)["dtype"] == dtype


def test_numbers_that_the_other_dtype_cannot_hold_are_refused(tmp_path: Path) -> None:
    large = make_checkpoint(tmp_path / "large")
    rewrite(large, lambda state: state["model.norm.weight"].fill_(1e6))
    with pytest.raises(
        FlexQuantError, match="'model.norm.weight' in .* holds numbers that float16 cannot hold"
    ):
        merge_checkpoints({"w8a8": large}, tmp_path / "merged", dtype="float16")
    assert not (tmp_path / "merged").exists()


def test_what_vllm_skips_is_left_out(w4a16: Path, tmp_path: Path) -> None:
    foreign = write_foreign(w4a16, tmp_path / "foreign", "gptq")
    skipped = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.layers.1.mlp.up_proj.bias": torch.zeros(256, dtype=torch.bfloat16),
    }
    rewrite(foreign, lambda state: state.update(skipped))
    sources = {"w8a8": make_checkpoint(tmp_path / "w8a8"), "w4a16": foreign}
    merge_checkpoints(sources, tmp_path / "merged")
    verify_checkpoint(tmp_path / "merged", sources)
    assert not [key for key in tensors_of(tmp_path / "merged") if key.endswith((".bias", "inv_freq"))]

    rewrite(foreign, lambda state: state["model.layers.1.mlp.up_proj.bias"].fill_(1))
    with pytest.raises(FlexQuantError, match=r"'w4a16' has parameter 'model.layers.1.mlp.up_proj.bias'"):
        merge_checkpoints(sources, tmp_path / "again")


def test_llm_compressors_section_of_2024_is_read(w4a16: Path, tmp_path: Path) -> None:
    old = make_checkpoint(tmp_path / "old", scheme="w4a16")
    config = config_of(old)
    config["compression_config"] = config.pop("quantization_config")
    (old / "config.json").write_text(json.dumps(config))
    merge_checkpoints({"w8a8": make_checkpoint(tmp_path / "w8a8"), "w4a16": old}, tmp_path / "merged")
    assert "compression_config" not in config_of(tmp_path / "merged")


def test_shards_without_an_index_have_to_be_complete(tmp_path: Path) -> None:
    w8a8 = make_checkpoint(tmp_path / "w8a8", num_shards=2)
    expected = tensors_of(w8a8)
    (w8a8 / "model.safetensors.index.json").unlink()
    assert_equal(tensors_of(w8a8), expected)
    (w8a8 / "model-00002-of-00002.safetensors").rename(tmp_path / "away")
    with pytest.raises(FlexQuantError, match=r"has 1 of 2 files such as model-00001-of-00002.safetensors"):
        read_tensors(w8a8)
    (w8a8 / "model-00001-of-00002.safetensors").rename(w8a8 / "a.safetensors")
    (w8a8 / "b.safetensors").hardlink_to(w8a8 / "a.safetensors")
    with pytest.raises(FlexQuantError, match=r" in a.safetensors and in b.safetensors; keep one"):
        read_tensors(w8a8)
