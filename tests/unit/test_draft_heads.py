# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Heads that predict further tokens (MTP) are merged from each source that has them, and split off again."""

import argparse
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig
from vllm.config.speculative import SpeculativeConfig

from flexquant.checkpoint.draft_heads import HEADS, NOT_CHECKED
from flexquant.checkpoint.folder import read_tensors
from flexquant.checkpoint.merged_config import read_model_config
from flexquant.checkpoint.safetensors_io import same_bytes
from flexquant.cli.checkpoint import inspect
from flexquant.doctor.examining import examine
from flexquant.merge import merge_checkpoints, split_checkpoint, verify_checkpoint
from flexquant.policy.routes import build_route_table
from flexquant.policy.rules import load_policy
from flexquant.serving.worker.weights import VariantLoader
from tests.checkpoints import StateDict, make_pair, quantise_int8
from tests.mtp import KINDS, is_of_head, make_mtp_pair
from tests.publishers import edits
from tests.read_keys import OUTCOMES, served
from tests.refusals import refused

Sources = dict[str, Path]
BOTH = ("w8a8", "w4a16")
LAYER_2, GATE = "model.layers.2.", "mlp.gate_proj.weight"
NO_PLACE = (
    r"and vLLM reads %d decoder layers, counted from 0, and %d heads that predict further tokens \(MTP\)"
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "quantised", "of"),
    [(BOTH, (), "w8a8"), (BOTH, BOTH, "w8a8"), (("w8a8",), ("w8a8",), "w8a8"), (("w4a16",), (), "w4a16")],
)
def test_heads_of_either_source_are_merged(kind, heads, quantised, of, tmp_path):
    pair, merged = make_mtp_pair(tmp_path, kind, heads=heads, quantised=quantised), tmp_path / "merged"
    merge_checkpoints(pair, merged)
    _, config = read_model_config(merged)
    assert config.draft_heads == of
    assert not any(is_of_head(f"{module}.") for module in config.shared_modules)
    kept = {key for key in read_tensors(merged) if is_of_head(key.partition(".")[2])}
    norms = {key for key in kept if "norm" in key}
    in_both = heads == BOTH
    assert norms and {key.partition(".")[0] for key in norms} == {"shared" if in_both else of}
    if in_both:
        own = {key.partition(".")[0] for key in kept} - {"shared"}
        assert own == {*quantised}, "heads in 16 bit are stored once"
    for variant, source in pair.items():
        split_checkpoint(merged, variant, tmp_path / "split" / variant)
        before, after = read_tensors(source), read_tensors(tmp_path / "split" / variant)
        assert before.keys() == after.keys()
        assert all(same_bytes(before[key], after[key]) for key in before if is_of_head(key))


def test_heads_of_a_nested_variant_are_stored_as_they_are(tmp_path):
    pair, merged = make_mtp_pair(tmp_path, "MiMo", quantised=BOTH), tmp_path / "merged"
    merge_checkpoints(pair, merged, nested="near")
    _, config = read_model_config(merged)
    assert config.nested == {"w8a8": "w4a16"} and config.draft_heads == "w8a8"
    before, after = read_tensors(pair["w8a8"]), read_tensors(merged)
    of_linears = ("proj.weight", "proj.weight_scale")
    weights = [key for key in before if is_of_head(key) and key.endswith(of_linears)]
    assert len(weights) == 2 * 7 + 1
    assert all(same_bytes(before[key], after.get(f"w8a8.{key}") or after[f"shared.{key}"]) for key in weights)


def test_without_heads_the_config_names_none(tmp_path):
    merge_checkpoints(make_pair(tmp_path), tmp_path / "merged")
    config, section = read_model_config(tmp_path / "merged")
    assert section.draft_heads is None and "draft_heads" not in config["quantization_config"]


def beyond(prefix: str, of: str = "model.layers.1.") -> edits.Edit:
    """Add what a layer holds once more."""
    return edits.tensors(lambda s: s.update({k.replace(of, prefix): s[k].clone() for k in [*s] if of in k}))


FEWER_STATED = edits.config(num_hidden_layers=1, layer_types=None)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3", "qwen3_moe"])
@pytest.mark.parametrize(
    ("edit", "layers"),
    [(FEWER_STATED, 1), (beyond(LAYER_2), 2), (beyond("mtp.layers.0."), 2)],
    ids=["fewer stated", "more stored", "mtp"],
)
def test_layers_that_the_class_does_not_have_are_refused(tmp_path, architecture, edit, layers):
    assert_refused(make_pair(tmp_path, architecture), edit, tmp_path, NO_PLACE % (layers, 0))


def test_a_server_and_the_doctor_refuse_layers_that_the_config_does_not_count(tmp_path):
    """Older releases merged such checkpoints."""
    sources, merged = make_pair(tmp_path), tmp_path / "merged"
    merge_checkpoints(sources, merged)
    edits.config(num_hidden_layers=1)(merged)
    with refused(NO_PLACE % (1, 0)):
        inspect(argparse.Namespace(folder=str(merged)))
    *_, last = examine(str(merged), [])
    assert last.level == "problem" and re.search(NO_PLACE % (1, 0), last.text)
    _, config = read_model_config(merged)
    routes = build_route_table(load_policy("phase"), sources, num_layers=1, max_tokens=64)
    loader = VariantLoader({name: torch.nn.Module() for name in sources}, config, routes)
    assert loader.wants("w8a8.model.layers.0.mlp.up_proj.weight")
    with refused("'model.layers.1.mlp.up_proj.weight', and its config.json says 1 d"):
        loader.wants("w8a8.model.layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize(
    ("kind", "edit", "message"),
    [
        ("DeepSeek", beyond("model.layers.4.", "model.layers.3."), NO_PLACE % (3, 1)),
        ("DeepSeek", edits.without(r"layers\.3\.eh_proj"), r"lacks 'model.layers.3.eh_proj.weight'"),
        ("DeepSeek", edits.without(r"layers\.3\.mlp\.experts\.2\.up"), "lacks 'model.layers.3.*experts.2.up"),
        ("GLM", edits.without(r"layers\.3\.(?!eh_proj)"), "lacks 'model.layers.3.input_layernorm.weight'"),
        ("Ernie", edits.without(r"mtp_block.*down_proj"), "lacks 'model.mtp_block.0.mlp.down_proj.weight'"),
        ("Qwen3.5", edits.without(r"mtp\..*\.q_norm"), "lacks 'mtp.layers.0.self_attn.q_norm.weight'"),
        ("Qwen3-Next", edits.without(r"mtp\.norm"), "lacks 'mtp.norm.weight'"),
        (
            "EXAONE",
            edits.tensors(lambda s: s.update({"mtp.fc.weight": s["mtp.fc.weight"][:, :128]})),
            r"has \[128, 128\] as the shape of 'mtp.fc.weight', or a part of it, and vLLM loads \[128, 256\]",
        ),
        ("MiMo", edits.section(ignore=["lm_head"]), r"'model.mtp_layers.0.*' of variant 'w8a8' is in 16 bit"),
        ("Qwen3-Next", edits.section(ignore=["re:.*(gate|lm_head|experts.*)$"]), r"'mtp.*is in 16 bit, tho"),
    ],
)
@pytest.mark.parametrize("heads", [BOTH, BOTH[:1]])
def test_heads_that_vllm_would_not_load_whole_are_refused(kind, edit, message, heads, tmp_path):
    pair = make_mtp_pair(tmp_path, kind, heads=heads)
    assert_refused({name: pair[name] for name in heads}, edit, tmp_path, message, pair)


@pytest.mark.parametrize("kind, prefix", [("MiMo", "model.mtp_layers.0."), ("Ernie", "model.mtp_block.0.")])
def test_heads_in_16_bit_are_ignored_by_the_names_that_vllm_looks_for(kind, prefix, tmp_path):
    pair = make_mtp_pair(tmp_path, kind, heads=("w8a8",))
    merge_checkpoints(pair, tmp_path / "merged")
    verify_checkpoint(tmp_path / "merged", pair)
    variants = read_model_config(tmp_path / "merged")[1].variants
    ignored, before = (set(variants[name].quantization_config["ignore"]) for name in BOTH)
    assert ignored - before == {
        f"model.layers.3.{name.removeprefix(prefix).removesuffix('.weight')}"
        for name in read_tensors(pair["w8a8"])
        if name.startswith(prefix) and name.endswith("_proj.weight")
    }


@pytest.mark.parametrize(
    ("number", "message"), [(0, NO_PLACE % (3, 0)), (2, "lacks 'model.layers.4.input_layernorm.weight'")]
)
def test_there_are_as_many_heads_as_the_config_says(number, message, tmp_path):
    edit = edits.config(num_nextn_predict_layers=number)
    assert_refused(make_mtp_pair(tmp_path, "GLM"), edit, tmp_path, message)


def test_a_projection_that_vllm_keeps_in_16_bit_is_refused_if_it_is_quantised(tmp_path):
    pair = make_mtp_pair(tmp_path, "MiMo")
    name = "model.mtp_layers.0.input_proj.weight"
    edit = edits.tensors(lambda s: s.update(quantise_int8(name, s.pop(name))))
    assert_refused({"w8a8": pair["w8a8"]}, edit, tmp_path, "is quantised, and stays in 16 bit", pair)


def test_experts_of_a_head_may_be_in_one_tensor(tmp_path):
    """Qwen3.5's are published so, and tools that quantise the model copy its heads."""

    def fuse(state: StateDict) -> None:
        def experts(part: str) -> torch.Tensor:
            names = [f"mtp.layers.0.mlp.experts.{i}.{part}_proj.weight" for i in range(4)]
            return torch.stack([state.pop(name) for name in names])

        fused = {"gate_up_proj": torch.cat([experts("gate"), experts("up")], 1), "down_proj": experts("down")}
        state.update({f"mtp.layers.0.mlp.experts.{part}": tensor for part, tensor in fused.items()})

    pair = make_mtp_pair(tmp_path, "Qwen3-Next", heads=("w8a8",))
    edits.tensors(fuse)(pair["w8a8"])
    merge_checkpoints(pair, tmp_path / "merged")
    names = ["re:.*(gate|lm_head|mtp.fc)$", "re:mtp.*(attn|shared_).*", "re:model.*experts.*"]
    ignored = edits.section(ignore=names)
    shutil.copytree(pair["w8a8"], of_section := tmp_path / "of_section")
    assert_refused({"w8a8": of_section}, ignored, tmp_path, "'mtp.layers.0.mlp.experts' of .* is in 16 bit")
    end = "mtp.layers.0.mlp.experts.down_proj"
    edit = edits.tensors(lambda state: state.update({end: state[end][:3]}))
    assert_refused({"w8a8": pair["w8a8"]}, edit, tmp_path, r"lacks 'mtp.layers.0.mlp.experts.3.down", pair)


def assert_refused(edited: Sources, edit: edits.Edit, tmp_path: Path, message: str, sources=None) -> None:
    for folder in edited.values():
        edit(folder)
    with refused(message):
        merge_checkpoints(sources or edited, tmp_path / "none")
    assert not [*tmp_path.glob("*none*")], "nothing is written"


def test_the_classes_with_heads_are_those_for_which_vllm_has_a_draft_class():
    checked = {name for name in HEADS if HEADS[name] != NOT_CHECKED}
    of_text = json.loads(OUTCOMES.read_text())["architectures"]
    for architecture in served():
        known = getattr(transformers, architecture, None)
        config = known.config_class() if known else AutoConfig.for_model(of_text[architecture]["model_type"])
        config.architectures = [architecture]
        has_heads = SpeculativeConfig.hf_config_override(config).architectures != [architecture]
        assert has_heads == (architecture in checked), architecture


@pytest.mark.parametrize("architecture", [name for name in HEADS if hasattr(transformers, name)])
def test_vllm_has_a_draft_class_for_each_class_with_heads(architecture):
    config = getattr(transformers, architecture).config_class()
    config.architectures, config.num_nextn_predict_layers = [architecture], 1
    assert SpeculativeConfig.hf_config_override(config).architectures != [architecture]
