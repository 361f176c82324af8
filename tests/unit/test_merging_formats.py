# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A merge reads checkpoints of other formats, dtypes and ages, and keeps every quantised value."""

import os
import shutil

import pytest
import torch

from flexquant.checkpoint.folder import read_tensors
from flexquant.merge import convert_checkpoint, merge_checkpoints, split_checkpoint, verify_checkpoint
from flexquant.merge.formats import open_source
from tests.checkpoints import make_checkpoint
from tests.foreign import assert_equal, config_of, tensors_of, write_foreign
from tests.publishers import edits
from tests.publishers.shapes import AWQ_AS_AUTO_ROUND, GPTQ_AS_AUTO_ROUND
from tests.refusals import refused

EIGHT_MIDDLES = -0x77777778
"""A word of eight zero points in the middle, 8, without an offset."""


def without_an_offset(state: dict[str, torch.Tensor]) -> None:
    """Store zero points as the releases of AutoRound without an offset do."""
    for key in [key for key in state if key.endswith("qzeros")]:
        state[key].fill_(EIGHT_MIDDLES)


PUBLISHED = {
    "gptq v2": ("gptq", {"checkpoint_format": "gptq_v2"}, None),
    "gptq with layers left out": ("gptq", {"dynamic": {"-:.*lm_head": {}}}, None),
    "AutoGPTQ's settings file": ("gptq", {}, edits.settings_in("quantize_config.json")),
    "AutoAWQ's settings file": (
        "awq",
        {"version": "GEMM", "modules_to_not_convert": ["gate"]},
        edits.settings_in("quant_config.json", bits="w_bit", group_size="q_group_size"),
    ),
    "AutoRound without the offset": ("gptq", GPTQ_AS_AUTO_ROUND, edits.tensors(without_an_offset)),
    "AutoRound as AWQ": ("awq", AWQ_AS_AUTO_ROUND | {"quant_method": "intel/auto-round"}, None),
}


@pytest.mark.parametrize("case", PUBLISHED)
def test_a_merge_reads_what_others_published(case, w4a16, tmp_path):
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


def test_block_fp8_keeps_every_byte(tmp_path):
    fp8 = make_checkpoint(tmp_path / "fp8", scheme=None)
    edits.block_fp8(fp8, columns=64)
    (group,) = open_source("fp8", fp8).quantization_config["config_groups"].values()
    assert group["weights"]["block_structure"] == [32, 64]
    assert group["input_activations"]["group_size"] == 64
    sources = {"fp8": fp8, "w4a16": make_checkpoint(tmp_path / "w4a16", scheme="w4a16")}
    merge_checkpoints(sources, tmp_path / "merged", policy="fp8-phase-batch")
    verify_checkpoint(tmp_path / "merged", sources)
    split_checkpoint(tmp_path / "merged", "fp8", tmp_path / "split")
    renamed = {k.replace("_scale_inv", "_scale"): t.view(torch.uint8) for k, t in tensors_of(fp8).items()}
    assert_equal({k: t.view(torch.uint8) for k, t in tensors_of(tmp_path / "split").items()}, renamed)
    for wrong in ({"weight_block_size": None}, {"activation_scheme": "static"}):
        edits.section(**wrong)(fp8)
        with refused("only blocks with dynamic activations"):
            open_source("fp8", fp8)


def test_auto_rounds_fp8_is_block_fp8(tmp_path):
    from vllm.model_executor.layers.quantization.inc import INCConfig

    for name, edit in (("deepseek", edits.block_fp8), ("auto_round", edits.auto_round_fp8)):
        edit(make_checkpoint(tmp_path / name, scheme=None))
    source, expected = (open_source("fp8", tmp_path / name) for name in ("auto_round", "deepseek"))
    assert source.quantization_config == expected.quantization_config
    assert source.tensors.keys() == expected.tensors.keys()
    served = config_of(tmp_path / "auto_round")["quantization_config"]
    assert INCConfig.from_config(served).group_size == (32, 32)
    wrongs = [("bits", 4), ("group_size", 32), ("group_size", [32]), ("sym", False), ("act_bits", 16)]
    wrongs += [("packing_format", "auto_round:fp8_static"), ("data_type", "int"), ("act_data_type", "int")]
    wrongs += [("act_group_size", -1), ("act_sym", False), ("act_dynamic", False), ("fmt", "e5m2")]
    for key, value in (*wrongs, ("activation_scheme", "static")):
        wrong = {key: value}
        with pytest.raises((AssertionError, ValueError)):
            INCConfig.from_config(served | wrong)
        edits.config(quantization_config=served | wrong)(tmp_path / "auto_round")
        with refused(f"AutoRound .*{key}.*FP8_BLOCK"):
            open_source("fp8", tmp_path / "auto_round")
    for same in ({"data_type": "fp8"}, *({key: None} for key in served if key.startswith("act_"))):
        written = {key: value for key, value in (served | same).items() if value is not None}
        edits.config(quantization_config=written)(tmp_path / "auto_round")
        assert open_source("fp8", tmp_path / "auto_round").tensors.keys() == expected.tensors.keys()
    for layer in ({"bits": 4}, {}, 4, {"bits": 16}):
        extra = {"model.layers.0.mlp.up_proj": layer}
        edits.config(quantization_config=served | {"extra_config": extra})(tmp_path / "auto_round")
        if layer != {"bits": 16}:
            with refused("extra_config"):
                open_source("fp8", tmp_path / "auto_round")
    assert open_source("fp8", tmp_path / "auto_round").tensors.keys() == expected.tensors.keys()


def test_scale_fmt_asks_vllm_for_what_it_does_without(tmp_path, monkeypatch):
    from vllm.envs import environment_variables
    from vllm.transformers_utils.config import get_config

    source, switch = make_checkpoint(tmp_path / "fp8", scheme=None, num_layers=1), "VLLM_USE_DEEP_GEMM_E8M0"
    edits.block_fp8(source, scale_fmt="ue8m0")
    convert_checkpoint(source, tmp_path / "converted")
    read = {}
    for folder in (source, tmp_path / "converted"):
        monkeypatch.setenv(switch, "")
        monkeypatch.delenv(switch)
        get_config(folder, trust_remote_code=False)
        read[folder.name] = (os.environ.get(switch), environment_variables[switch]())
    assert read == {"fp8": ("1", True), "converted": (None, True)}


def test_two_dtypes_are_merged_if_one_is_named(w4a16, tmp_path):
    sources = {"w8a8": make_checkpoint(tmp_path / "w8a8"), "w4a16": tmp_path / "half"}
    edits.in_half(write_foreign(w4a16, tmp_path / "half", "gptq"))
    with refused("dtype: 'bfloat16' against 'float16'.*--dtype bfloat16"):
        merge_checkpoints(sources, tmp_path / "merged")
    for dtype in ("bfloat16", "float16"):
        merge_checkpoints(sources, tmp_path / dtype, dtype=dtype)
        verify_checkpoint(tmp_path / dtype, sources)
        merged = tensors_of(tmp_path / dtype)
        assert merged["shared.model.norm.weight"].dtype is getattr(torch, dtype)
        assert merged["w4a16.model.layers.0.mlp.up_proj.weight_scale"].dtype is getattr(torch, dtype)
        assert config_of(tmp_path / dtype)["dtype"] == dtype


def test_what_is_in_32_bit_is_cast_by_the_server(tmp_path):
    single = make_checkpoint(tmp_path / "w8a8", num_layers=1)
    edits.stored_in("float32")(single)
    merge_checkpoints({"w8a8": single}, tmp_path / "merged", dtype="bfloat16")
    assert {t.dtype for t in tensors_of(tmp_path / "merged").values()} == {torch.int8, torch.float32}
    assert config_of(tmp_path / "merged")["dtype"] == "bfloat16"


def test_numbers_that_the_other_dtype_cannot_hold_are_refused(tmp_path):
    large = make_checkpoint(tmp_path / "large")
    edits.tensors(lambda state: state["model.norm.weight"].fill_(1e6))(large)
    with refused("'model.norm.weight' in .* holds numbers that float16 cannot hold"):
        merge_checkpoints({"w8a8": large}, tmp_path / "merged", dtype="float16")
    assert not (tmp_path / "merged").exists()


def test_what_vllm_skips_is_left_out(w4a16, tmp_path):
    foreign = write_foreign(w4a16, tmp_path / "foreign", "gptq")
    skipped = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.layers.1.mlp.up_proj.bias": torch.zeros(256, dtype=torch.bfloat16),
    }
    edits.tensors(lambda state: state.update(skipped))(foreign)
    sources = {"w8a8": make_checkpoint(tmp_path / "w8a8"), "w4a16": foreign}
    merge_checkpoints(sources, tmp_path / "merged")
    verify_checkpoint(tmp_path / "merged", sources)
    assert not [key for key in tensors_of(tmp_path / "merged") if key.endswith((".bias", "inv_freq"))]
    edits.tensors(lambda state: state["model.layers.1.mlp.up_proj.bias"].fill_(1))(foreign)
    with refused(r"'w4a16' has parameter 'model.layers.1.mlp.up_proj.bias'"):
        merge_checkpoints(sources, tmp_path / "again")


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales", "g_idx"])
@pytest.mark.parametrize("scheme", [None, "w8a8"])
def test_a_part_of_no_packed_linear_is_named(scheme, part, tmp_path):
    folder = make_checkpoint(tmp_path / "dense", scheme=scheme, num_layers=1)
    name = f"model.layers.0.self_attn.q_proj.{part}"
    edits.tensors(lambda state: state.update({name: torch.zeros(128, dtype=torch.int32)}))(folder)
    with refused(f"dense has {name}, a part of an AWQ or GPTQ linear"):
        open_source("dense", folder)


def test_a_checkpoint_of_modelopt_is_called_one(tmp_path):
    folder = make_checkpoint(tmp_path / "fp8", scheme=None, num_layers=1)
    edits.file("hf_quant_config.json", '{"quantization": {"quant_algo": "FP8"}}')(folder)
    with refused("quant_method 'modelopt'; .* quantise the model again"):
        open_source("fp8", folder)


def test_norms_in_32_bit_are_one_variants(w4a16, tmp_path):
    """vLLM casts them when it loads them, so their numbers decide."""
    w8a8 = make_checkpoint(tmp_path / "w8a8")
    edits.tensors(lambda s: s.update({k: t.float() for k, t in s.items() if "norm" in k}))(w8a8)
    sources = {"w8a8": w8a8, "w4a16": w4a16}
    merge_checkpoints(sources, tmp_path / "merged")
    verify_checkpoint(tmp_path / "merged", sources)
    dtypes = {k: t.dtype for k, t in tensors_of(tmp_path / "merged").items() if "model.norm" in k}
    assert dtypes == {"w8a8.model.norm.weight": torch.float32, "w4a16.model.norm.weight": torch.bfloat16}


def test_llm_compressors_section_of_2024_is_read(w4a16, tmp_path):
    old = make_checkpoint(tmp_path / "old", scheme="w4a16")
    edits.edit_json("config.json", lambda c: c.update(compression_config=c.pop("quantization_config")))(old)
    merge_checkpoints({"w8a8": make_checkpoint(tmp_path / "w8a8"), "w4a16": old}, tmp_path / "merged")
    assert "compression_config" not in config_of(tmp_path / "merged")


def test_files_beside_the_models_are_not_read(w4a16, tmp_path):
    """A file that no index lists, and Mistral's copy of the model: vLLM reads neither."""
    other = make_checkpoint(tmp_path / "other", scheme=None, seed=1)
    indexed, expected = make_checkpoint(tmp_path / "indexed", num_shards=2), tensors_of(w4a16)
    read = tensors_of(indexed)
    for name in ("model.safetensors", "extra.safetensors", "consolidated.safetensors"):
        shutil.copy(other / "model.safetensors", indexed / name)
    assert_equal(tensors_of(indexed), read)
    for name in ("gptq_model-4bit.safetensors", "model.safetensors"):
        single = write_foreign(w4a16, tmp_path / name, "gptq")
        edits.renamed(name)(single)
        shutil.copy(other / "model.safetensors", single / "consolidated.safetensors")
        merge_checkpoints({"w4a16": single}, tmp_path / f"{name}.merged")
        split_checkpoint(tmp_path / f"{name}.merged", "w4a16", tmp_path / f"{name}.split")
        assert_equal(tensors_of(tmp_path / f"{name}.split"), expected)


def test_shards_without_an_index_have_to_be_complete(tmp_path):
    w8a8 = make_checkpoint(tmp_path / "w8a8", num_shards=2)
    expected = tensors_of(w8a8)
    (w8a8 / "model.safetensors.index.json").unlink()
    assert_equal(tensors_of(w8a8), expected)
    (w8a8 / "model-00002-of-00002.safetensors").rename(tmp_path / "away")
    with refused(r"has 1 of 2 files such as model-00001-of-00002.safetensors"):
        read_tensors(w8a8)
    (w8a8 / "model-00001-of-00002.safetensors").rename(w8a8 / "a.safetensors")
    (w8a8 / "b.safetensors").hardlink_to(w8a8 / "a.safetensors")
    with refused(r" in a.safetensors and in b.safetensors; keep one"):
        read_tensors(w8a8)
