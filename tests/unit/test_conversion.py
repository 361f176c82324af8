# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Checkpoints in the formats of GPTQ and AWQ become those of compressed-tensors, value by value."""

import pytest
import torch

from flexquant.cli import main
from flexquant.merge import convert_checkpoint, merge_checkpoints
from flexquant.merge.formats import open_source
from tests import foreign as formats
from tests.checkpoints import make_checkpoint
from tests.foreign import assert_equal, config_of, tensors_of, unpacked, write_foreign
from tests.publishers import edits
from tests.refusals import refused


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
def test_gptq_gives_the_same_tensors_back(form, w4a16, tmp_path):
    foreign = write_foreign(w4a16, tmp_path / "gptq", "gptq", checkpoint_format=form)
    result = convert_checkpoint(foreign, tmp_path / "converted")
    assert_equal(tensors_of(tmp_path / "converted"), tensors_of(w4a16))
    assert result == {"output": str(tmp_path / "converted"), "from": "gptq", "linears": 2 * 7}
    weights = config_of(tmp_path / "converted")["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["symmetric"], weights["group_size"]) == (4, True, 64)
    assert config_of(tmp_path / "converted")["quantization_config"]["ignore"] == ["lm_head"]


@pytest.mark.parametrize(
    ("method", "settings", "format_tensors", "dtype"),
    [
        ("awq", {}, formats.awq_tensors, torch.float16),
        ("gptq", {"sym": False}, formats.gptq_tensors, torch.bfloat16),
    ],
)
def test_values_scales_and_zero_points_are_kept(method, settings, format_tensors, dtype, w4a16, tmp_path):
    foreign = write_foreign(w4a16, tmp_path / method, method, **settings)
    module = "model.layers.1.mlp.down_proj"
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 16, (128, 256), generator=generator)
    zeros = torch.randint(0, 16, (128, 4), generator=generator)
    scales = torch.rand((128, 4), generator=generator).to(dtype)
    own = {f"{module}.{part}": tensor for part, tensor in format_tensors(values, zeros, scales).items()}
    edits.tensors(lambda state: state.update(own))(foreign)
    convert_checkpoint(foreign, tmp_path / "converted")
    found = unpacked(tensors_of(tmp_path / "converted"), module)
    for tensor, expected in zip(found, (values, zeros, scales), strict=True):
        assert torch.equal(tensor.to(expected.dtype), expected)


def test_another_dtype_is_asked_for_where_the_variants_differ(w4a16, tmp_path, capsys):
    half = make_checkpoint(tmp_path / "half", scheme="w4a16")
    edits.in_half(half)
    foreign = write_foreign(half, tmp_path / "gptq", "gptq")
    w8a8 = make_checkpoint(tmp_path / "w8a8")
    command = ["convert", str(foreign), "--output", str(tmp_path / "converted"), "--overwrite"]
    convert_checkpoint(foreign, tmp_path / "converted")
    assert main(command[:-1]) == 1 and main([*command, "--dtype", "bfloat16"]) == 0
    assert ": 14 linears, converted from gptq" in capsys.readouterr().out
    assert config_of(tmp_path / "converted")["dtype"] == "bfloat16"
    rounded = {
        key: tensor.half().bfloat16() if tensor.dtype is torch.bfloat16 else tensor
        for key, tensor in tensors_of(w4a16).items()
    }
    assert_equal(tensors_of(tmp_path / "converted"), rounded)
    merge_checkpoints({"w8a8": w8a8, "w4a16": tmp_path / "converted"}, tmp_path / "merged")


def test_a_model_in_16_bit_stays_one(tmp_path):
    plain = make_checkpoint(tmp_path / "plain", scheme=None)
    assert convert_checkpoint(plain, tmp_path / "converted", dtype="float16")["from"] == "16 bit"
    found = config_of(tmp_path / "converted")
    assert found["dtype"] == "float16" and "quantization_config" not in found
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "converted").values()} == {torch.float16}


without_g_idx = edits.without(r"\.g_idx$")


@pytest.mark.parametrize(("scheme", "found"), [(None, "not quantised"), ("w8a8", "tensors already")])
def test_what_a_merge_reads_as_it_is_needs_no_conversion(scheme, found, tmp_path):
    folder = make_checkpoint(tmp_path / "made", scheme=scheme, num_layers=1)
    with refused(f"{found}; merge it as it is"):
        convert_checkpoint(folder, tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


def test_without_g_idx_inputs_are_in_order(w4a16, tmp_path):
    foreign = write_foreign(w4a16, tmp_path / "gptq", "gptq")
    without_g_idx(foreign)
    convert_checkpoint(foreign, tmp_path / "converted")
    assert_equal(tensors_of(tmp_path / "converted"), tensors_of(w4a16))


def test_one_group_of_all_inputs_has_one_order(w4a16, tmp_path):
    foreign = write_foreign(w4a16, tmp_path / "gptq", "gptq", group_size=-1, desc_act=True)
    for inputs in (128, 256):
        edits.requantised(".*down_proj" if inputs == 256 else "(?!.*down_proj)", group_size=inputs)(foreign)
    for has_order in (True, False):
        if not has_order:
            without_g_idx(foreign)
        source = open_source("w4a16", foreign)
        (group,) = source.quantization_config["config_groups"].values()
        assert group["weights"]["strategy"] == "channel"
        assert source.tensors["model.layers.0.mlp.down_proj.weight_scale"].shape == (128, 1)


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_groups_of_an_unstated_size_have_128_inputs(method, tmp_path):
    made = make_checkpoint(tmp_path / "made", scheme="w4a16", group_size=128)
    foreign = write_foreign(made, tmp_path / "foreign", method)
    edits.edit_json("config.json", lambda content: content["quantization_config"].pop("group_size"))(foreign)
    (group,) = open_source("w4a16", foreign).quantization_config["config_groups"].values()
    assert group["weights"]["group_size"] == 128


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_what_is_left_in_16_bit_is_found_in_the_tensors(method, w4a16, tmp_path):
    """A name to leave out may be a part of other names, as AutoAWQ has it."""
    settings = {"modules_to_not_convert": ["gate"]} if method == "awq" else {}
    foreign = write_foreign(w4a16, tmp_path / method, method, **settings)
    left = "model.layers.0.mlp.gate"
    router = {f"{left}.weight": torch.zeros(4, 128, dtype=torch.bfloat16)}
    edits.tensors(lambda state: state.update(router))(foreign)
    assert convert_checkpoint(foreign, tmp_path / "converted")["linears"] == 2 * 7
    assert sorted(config_of(tmp_path / "converted")["quantization_config"]["ignore"]) == ["lm_head", left]
    packed = {key for key in tensors_of(tmp_path / "converted") if key.endswith(".weight_packed")}
    assert packed == {key for key in tensors_of(w4a16) if key.endswith(".weight_packed")}


def test_each_expert_is_converted_and_routers_stay_in_16_bit(tmp_path):
    made = make_checkpoint(tmp_path / "compressed", "qwen2_moe", "w4a16", num_layers=1)
    convert_checkpoint(write_foreign(made, tmp_path / "gptq", "gptq"), tmp_path / "converted")
    assert_equal(tensors_of(tmp_path / "converted"), tensors_of(made))
    in_16_bit = ["lm_head", *(f"model.layers.0.mlp.{gate}" for gate in ("gate", "shared_expert_gate"))]
    assert config_of(tmp_path / "converted")["quantization_config"]["ignore"] == in_16_bit


def test_files_that_a_variant_needs_are_taken_along_and_no_others(w4a16, tmp_path):
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


def shift_a_zero(state: dict[str, torch.Tensor]) -> None:
    state["model.layers.0.self_attn.k_proj.qzeros"] += 1


def quantise_the_head(state: dict[str, torch.Tensor]) -> None:
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        if (key := f"model.layers.0.mlp.up_proj.{part}") in state:
            state[f"lm_head.{part}"] = state[key].clone()
    del state["lm_head.weight"]


UP = "model.layers.0.mlp.up_proj"
AWQ = {"quant_method": "awq"}


def lose(part: str) -> edits.Edit:
    return edits.without(rf"^{UP}\.{part}$")


def cut(part: str) -> edits.Edit:
    return edits.tensors(lambda state: state.update({f"{UP}.{part}": state[f"{UP}.{part}"][:-1]}))


def widen(state: dict[str, torch.Tensor]) -> None:
    state[f"{UP}.qweight"] = state[f"{UP}.qweight"].long()


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        ({"dynamic": {"-:.*down_proj": {}, "+:.*up_proj": {"bits": 8}}}, None, "bits and group_size"),
        ({"desc_act": True}, edits.tensors(edits.reordered), r"layers\.1\.self_attn\.o_proj .*desc_act"),
        ({}, edits.tensors(shift_a_zero), r"layers\.0\.self_attn\.k_proj has zero points"),
        ({"quant_method": "squeezellm"}, None, "squeezellm"),
        ({"quant_method": "compressed-tensors"}, None, "a part of an AWQ or GPTQ linear"),
        ({**AWQ, "version": "gemv"}, None, "GEMM"),
        ({"lm_head": True}, edits.tensors(quantise_the_head), "'lm_head.weight' has shape"),
        (AWQ, edits.tensors(quantise_the_head), "'lm_head.weight' has shape"),
        ({"checkpoint_format": "marlin"}, edits.tensors(edits.packed_for_marlin), "'marlin'"),
        ({"is_marlin_format": True}, edits.tensors(edits.packed_for_marlin), "no linear"),
        (AWQ, edits.tensors(edits.packed_for_marlin), "no linear"),
        ({"desc_act": True}, without_g_idx, "desc_act"),
        ({"sym": False}, lose("qzeros"), rf"{UP}.qzeros is missing"),
        (AWQ, lose("scales"), rf"{UP}.scales is missing"),
        ({}, cut("scales"), rf"{UP}.scales is BF16 \[1, 256\]"),
        (AWQ, cut("qzeros"), rf"{UP}.qzeros is I32 \[1, 32\] instead of I32 \[2, 32\]"),
        ({}, cut("g_idx"), rf"{UP}.g_idx is I32 \[127\]"),
        ({}, edits.tensors(widen), rf"{UP}.qweight is I64"),
        ({"dynamic": {"+:.*o_proj": {"desc_act": True}}}, without_g_idx, "o_proj .*desc_act"),
    ],
)
def test_what_cannot_be_converted_leaves_nothing(settings, change, message, w4a16, tmp_path):
    method = "awq" if settings.get("quant_method") == "awq" else "gptq"
    foreign = write_foreign(w4a16, tmp_path / "foreign", method, **settings)
    if change:
        change(foreign)
    with refused(message):
        convert_checkpoint(foreign, tmp_path / "converted")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign"]
