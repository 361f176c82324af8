# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What all sources lack, and what only one has: a class's parameters, and tensors that it does not read."""

import re
from pathlib import Path

import pytest
import torch

from flexquant.checkpoint.folder import read_tensors
from flexquant.checkpoint.merged_config import read_merged_config
from flexquant.checkpoint.model_config import JsonObject
from flexquant.merge import convert_checkpoint, merge_checkpoints, split_checkpoint, verify_checkpoint
from tests.checkpoints import StateDict, make_checkpoint, make_pair
from tests.publishers import edits
from tests.refusals import refused
from tests.states import make_variants
from tests.tied_heads import make_tied
from tests.vision import KINDS, RENAMED, make_vision_checkpoint, write_as_another_release

SCHEMES = ("w8a8", "w4a16")
Sources = dict[str, Path]


def assert_refused(sources: Sources, edit: edits.Edit, tmp_path: Path, named: str) -> None:
    """Assert that variants are not merged after an edit of each."""
    for folder in sources.values():
        edit(folder)
    with refused(named):
        merge_checkpoints(sources, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        (r"layers\.1\.self_attn\.q_proj\.bias", r"model\.layers\.1\.self_attn\.q_proj\.bias"),
        (r"layers\.0\.mlp\.down_proj\.", r"model\.layers\.0\.mlp\.down_proj\.weight"),
        (r"layers\.1\.input_layernorm", r"model\.layers\.1\.input_layernorm\.weight"),
        (r"^model\.norm", r"model\.norm\.weight"),
        (r"^lm_head", r"lm_head\.weight"),
        (r"embed_tokens", r"model\.embed_tokens\.weight"),
    ],
)
@pytest.mark.parametrize("variants", [1, 2])
def test_what_the_class_needs_is_named_even_if_all_sources_lack_it(tmp_path, pattern, named, variants):
    sources = dict(list(make_pair(tmp_path, "qwen2").items())[:variants])
    named = f"lacks 1 of the parameters of a Qwen2ForCausalLM, '{named}'"
    assert_refused(sources, edits.without(pattern), tmp_path, named)


def test_what_is_tied_is_missed_with_what_it_is_tied_to(tmp_path):
    sources = {"w8a8": make_checkpoint(tmp_path / "w8a8", tie_word_embeddings=True)}
    lost = edits.without("embed_tokens")
    assert_refused(sources, lost, tmp_path, r"lacks 2 of .*'model\.embed_tokens\.weight'")


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        *(("qwen3_next", f"layers.0.linear_attn.{own}") for own in ("A_log", "dt_bias", "conv1d.weight")),
        ("qwen3_next", "layers.0.linear_attn.norm.weight"),
        ("falcon_h1", "layers.1.mamba.D"),
        ("falcon_h1", "layers.1.mamba.conv1d.bias"),
    ],
)
def test_a_layer_with_a_state_needs_all_that_it_is_computed_with(tmp_path, architecture, name):
    folder = make_variants(tmp_path, architecture)
    sources = {s: folder / s for s in SCHEMES}
    assert_refused(sources, edits.without(rf"{re.escape(name)}$"), tmp_path, f"'model.{name}'")


@pytest.mark.parametrize("matrix", ["w1", "w2", r"w[123]"])
def test_one_expert_is_missed_among_many(tmp_path, matrix):
    lost = edits.without(rf"layers\.1\..*experts\.2\.{matrix}\.")
    assert_refused(make_pair(tmp_path, "mixtral"), lost, tmp_path, r"model\.layers\.1\.mlp\.experts\.")


def test_experts_may_be_stored_one_by_one_where_a_tensor_holds_all(tmp_path):
    """llm-compressor stores them so, whatever transformers reads."""

    def apart(state: StateDict) -> None:
        for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            experts, _, fused = name.rpartition(".")
            parts = ("gate_proj", "up_proj") if fused == "gate_up_proj" else ("down_proj",)
            for number, weight in enumerate(state.pop(name).transpose(1, 2)):
                for part, own in zip(parts, weight.chunk(len(parts)), strict=True):
                    state[f"{experts}.{number}.{part}.weight"] = own.contiguous()

    sources = {s: make_vision_checkpoint(tmp_path / s, s, KINDS["qwen3_vl_moe"]) for s in SCHEMES}
    for folder in sources.values():
        edits.tensors(apart)(folder)
    merge_checkpoints(sources, tmp_path / "whole")
    lost = edits.without(r"layers\.1\..*experts\.2\.up_proj\.")
    assert_refused(sources, lost, tmp_path, r"lacks 1 of .*layers\.1\.mlp\.experts\.gate_up_proj'")


@pytest.mark.parametrize("kind", ["mistral3", "qwen2_5_vl"])
def test_a_tower_needs_its_tensors(tmp_path, kind):
    lost = edits.without(r"(vision_tower|visual)\..*\b1\..*norm.*\.weight$")
    sources = {s: make_vision_checkpoint(tmp_path / s, s, KINDS[kind]) for s in SCHEMES}
    assert_refused(sources, lost, tmp_path, r"lacks \d of the parameters of a .*norm")


def test_conversion_needs_them_too(tmp_path):
    folder = make_checkpoint(tmp_path / "model", "qwen2", None)
    edits.without(r"layers\.1\.self_attn\.k_proj\.bias")(folder)
    with refused(r"'model\.layers\.1\.self_attn\.k_proj\.bias'"):
        convert_checkpoint(folder, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lm_head.weight", torch.nan),
        ("model.norm.weight", torch.inf),
        ("model.embed_tokens.weight", -torch.inf),
        ("model.layers.1.self_attn.q_proj.bias", torch.nan),
        ("model.layers.0.mlp.up_proj.weight_scale", torch.nan),
        ("model.layers.1.mlp.down_proj.weight_scale", torch.inf),
    ],
)
@pytest.mark.parametrize("variants", [1, 2])
def test_a_number_that_is_not_finite_is_refused_wherever_it_is(tmp_path, name, value, variants):
    def put(state: StateDict) -> None:
        state[name].view(-1)[-1] = value

    sources = dict(list(make_pair(tmp_path, "qwen2").items())[:variants])
    named = f"{name.removesuffix('.weight_scale')}.* NaN or infinite"
    assert_refused(sources, edits.tensors(put), tmp_path, named)


def test_a_zero_point_is_a_number_too(tmp_path):
    def asymmetric(state: StateDict) -> None:
        scales = [name for name in state if name.endswith("weight_scale")]
        state |= {name.replace("scale", "zero_point"): torch.zeros_like(state[name]) for name in scales}
        state["model.layers.0.mlp.up_proj.weight_zero_point"][-1] = torch.nan

    def say_so(config: JsonObject) -> None:
        for group in config["quantization_config"]["config_groups"].values():
            group["weights"]["symmetric"] = False

    folder = make_checkpoint(tmp_path / "w4a16", "qwen2", "w4a16")
    edits.edit_json("config.json", say_so)(folder)
    named = "up_proj.weight_zero_point' .* NaN or infinite"
    assert_refused({"w4a16": folder}, edits.tensors(asymmetric), tmp_path, named)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32])
def test_every_dtype_has_its_nan(tmp_path, dtype):
    def put(state: StateDict) -> None:
        weight = state["model.layers.0.mlp.up_proj.weight"].float()
        weight[0, 0] = torch.nan
        state["model.layers.0.mlp.up_proj.weight"] = weight.to(dtype)

    scheme = "fp8" if dtype is torch.float8_e4m3fn else None
    sources = {"one": make_checkpoint(tmp_path / "one", "qwen2", scheme)}
    assert_refused(sources, edits.tensors(put), tmp_path, "up_proj.* NaN or infinite")


def test_frequencies_that_one_source_stores_are_left_out(tmp_path):
    ends = [f"self_attn.rotary_emb.{end}" for end in ("cos_cached", "sin_cached", "inv_freq")]
    added = {f"model.layers.0.{end}": torch.ones(16) for end in (*ends, "rotary_pos_emb.inv_freq")}
    sources = make_pair(tmp_path, "qwen2")
    edits.tensors(lambda state: state.update(added))(sources["w8a8"])
    merge_checkpoints(sources, tmp_path / "merged")
    assert not any("rotary" in key for key in read_tensors(tmp_path / "merged"))


def test_a_part_of_a_head_that_drafts_is_refused_in_a_vision_model(tmp_path):
    sources = {s: make_vision_checkpoint(tmp_path / s, s, KINDS["qwen3_5"]) for s in SCHEMES}
    edit = edits.tensors(lambda state: state.update({"mtp.fc.weight": torch.ones(8, 16)}))
    assert_refused(sources, edit, tmp_path, r"lacks 'mtp\.layers\.0\.input_layernorm\.weight'")


def test_a_parameter_that_one_source_has_and_the_class_has_not_is_refused(tmp_path):
    sources, added = make_pair(tmp_path, "qwen2"), {"model.layers.0.self_attn.q_norm.weight": torch.ones(32)}
    edits.tensors(lambda state: state.update(added))(sources["w8a8"])
    named = "'w8a8' has parameter .*q_norm.weight' and 'w4a16' does not"
    assert_refused(sources, lambda folder: None, tmp_path, named)


@pytest.mark.parametrize("listed", ["by pattern", "by name"])
@pytest.mark.parametrize("kind", RENAMED)
def test_names_of_two_releases_are_those_of_one_class(tmp_path, kind, listed):
    sources = {s: make_vision_checkpoint(tmp_path / s, s, KINDS[kind]) for s in SCHEMES}
    written = set(read_tensors(sources["w8a8"]))
    names = write_as_another_release(sources["w4a16"], kind)
    if listed == "by name":
        left = {n for n in names if n.endswith(".weight") and f"{n}_packed" not in names}
        packed = [new.removesuffix(".weight_packed") for new in names.values() if new.endswith("_packed")]
        edits.section(ignore=sorted(names[n].removesuffix(".weight") for n in left))(sources["w4a16"])
        edits.edit_json(
            "config.json",
            lambda c: c["quantization_config"]["config_groups"]["group_0"].update(targets=packed),
        )(sources["w4a16"])
    merge_checkpoints(sources, tmp_path / "merged")
    verify_checkpoint(tmp_path / "merged", sources)
    keys = read_tensors(tmp_path / "merged")
    assert {key.partition(".")[2] for key in keys if key.startswith("shared.")} <= written
    merged, _ = read_merged_config(tmp_path / "merged")
    assert any(module.endswith("norm") for module in merged.shared_modules)
    split_checkpoint(tmp_path / "merged", "w4a16", tmp_path / "again")
    assert len(read_tensors(tmp_path / "again")) == len(names)


@pytest.mark.parametrize("more", SCHEMES)
def test_what_one_source_may_lack_hides_no_other_difference(more, tmp_path):
    """A tied model's head, and frequencies, come before the parameter that counts."""
    folders = {v: make_tied(tmp_path / v, v, "copy" if v == "w8a8" else None) for v in SCHEMES}
    (other,) = {*SCHEMES} - {more}
    frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq"
    norm = "model.layers.1.self_attn.q_norm.weight"
    edits.tensors(lambda state: state.update({frequencies: torch.ones(16)}))(folders["w8a8"])
    edits.tensors(lambda state: state.update({norm: torch.ones(32)}))(folders[more])
    with refused(f"'{more}' has parameter '{norm}' and '{other}' does not"):
        merge_checkpoints(folders, tmp_path / "merged")
