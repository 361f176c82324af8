# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Experts, latent attention, vision-language models: what is compared beside K and V, and stored once."""

from functools import partial
from pathlib import Path

import pytest
import torch

from flexquant.checkpoint.folder import read_tensors
from flexquant.checkpoint.merged_config import read_merged_config
from flexquant.checkpoint.module_names import above, decoder_stacks, tower
from flexquant.merge import merge_checkpoints, split_checkpoint, verify_checkpoint
from tests.checkpoints import EXPERTS, StateDict, make_checkpoint, make_pair
from tests.foreign import config_of
from tests.refusals import refused
from tests.unit.edits import edit_tensor, in_float32
from tests.vision import KINDS, make_vision_checkpoint

NORM = "post_attention_layernorm.weight"


def test_a_norm_folded_into_router_and_experts_is_the_same_model(tmp_path):
    def folded(state: StateDict) -> StateDict:
        norms = {name.removesuffix(NORM): t.float() for name, t in state.items() if name.endswith(NORM)}
        readers = ("mlp.gate.weight", "gate_proj.weight", "up_proj.weight")
        for name in [name for name in state if name.endswith(readers)]:
            state[name] = (state[name] * norms[name.split("mlp.")[0]]).bfloat16()
        return state | {name: torch.ones_like(t) for name, t in state.items() if name.endswith(NORM)}

    merge_checkpoints(make_pair(tmp_path, "qwen3_moe", folded), tmp_path / "merged")
    assert read_merged_config(tmp_path / "merged")[0].layered_plans


@pytest.mark.parametrize("kind, up, down", [("qwen3_moe", "up_proj", "down_proj"), ("mixtral", "w3", "w2")])
def test_a_fold_between_an_experts_up_and_down_projections_is_the_same_model(tmp_path, kind, up, down):
    def folded(state: StateDict) -> StateDict:
        for name in [name for name in state if name.endswith(f"{up}.weight")]:
            scale, other = torch.empty(len(state[name])).uniform_(0.85, 1.15), name.replace(up, down)
            state[name] = (state[name] * scale[:, None]).bfloat16()
            state[other] = (state[other] / scale).bfloat16()
        return state

    merge_checkpoints(make_pair(tmp_path, kind, folded), tmp_path / "merged")
    assert read_merged_config(tmp_path / "merged")[0].layered_plans


def test_another_router_is_another_model(tmp_path):
    other = in_float32(edit_tensor(r"layers\.1\.mlp\.gate\.weight", lambda w: w.roll(1, dims=0)))
    with refused("layer 1 mlp.gate differs"):
        merge_checkpoints(make_pair(tmp_path, "qwen3_moe", other), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_another_number_of_experts_is_another_model(tmp_path):
    sources = make_pair(tmp_path, "qwen3_moe")
    sources["w4a16"] = make_checkpoint(tmp_path / "other", "qwen3_moe", "w4a16", num_experts=4)
    with refused(r"experts: 8 against 4"):
        merge_checkpoints(sources, tmp_path / "merged")


def test_other_experts_cannot_be_mixed(tmp_path):
    def other(state: StateDict) -> StateDict:
        state["model.layers.0.mlp.experts.3.down_proj.weight"][::20] *= 1.5
        return state

    merge_checkpoints(make_pair(tmp_path, "qwen3_moe", other), tmp_path / "merged")
    merged = read_merged_config(tmp_path / "merged")[0]
    assert not merged.layered_plans
    assert "mlp.experts.3.down_proj" in merged.kv_compatibility["residual_message"]


def test_what_expands_a_latent_cache_is_held_once(tmp_path):
    merge_checkpoints(make_pair(tmp_path, "deepseek_v2"), tmp_path / "merged")
    shared = read_merged_config(tmp_path / "merged")[0].shared_modules
    expanding = [f"model.layers.{layer}.self_attn.kv_b_proj" for layer in (0, 1)]
    assert [name for name in shared if ".layers." in name] == expanding


def test_only_experts_that_are_all_equal_are_held_once(tmp_path):
    other = in_float32(edit_tensor(r"layers\.0\.mlp\.experts\.3\.up_proj\.weight", lambda w: 1.01 * w))
    merge_checkpoints(make_pair(tmp_path, "qwen3_moe", other, ignore=[EXPERTS]), tmp_path / "merged")
    shared = read_merged_config(tmp_path / "merged")[0].shared_modules
    assert "model.layers.1.mlp.experts" in shared
    assert not any(name.startswith("model.layers.0.") for name in shared)


ARCHITECTURE = KINDS["idefics3"].architecture
PATCHES = "model.vision_model.embeddings.patch_embedding.weight"


def sources(folder: Path, kind: str = "idefics3", **of_the_other) -> dict[str, Path]:
    """Return W8A8 of a model, and W4A16 of it or, with arguments, of another one."""
    return {
        "w8a8": make_vision_checkpoint(folder / "w8a8", "w8a8", KINDS[kind]),
        "w4a16": make_vision_checkpoint(folder / "w4a16", "w4a16", KINDS[kind], **of_the_other),
    }


def test_towers_are_stored_once_and_the_class_reads_images(tmp_path):
    variants = sources(tmp_path)
    merge_checkpoints(variants, tmp_path / "merged")
    merged, layers = read_merged_config(tmp_path / "merged")
    assert (merged.base_architecture, layers) == (ARCHITECTURE, 4)
    assert config_of(tmp_path / "merged")["architectures"] == [f"FlexQuant{ARCHITECTURE}"]
    around = ("connector", "text_model.embed_tokens", "text_model.norm", "vision_model")
    assert merged.shared_modules == ("lm_head", *(f"model.{name}" for name in around))
    keys = read_tensors(tmp_path / "merged").keys()
    towers = [key for key in keys if ".vision_model." in key or ".connector." in key]
    assert towers and all(key.startswith("shared.") for key in towers)
    assert (tmp_path / "merged" / "processor_config.json").is_file()
    verify_checkpoint(tmp_path / "merged", against=variants)


def test_a_variant_comes_back_with_its_architecture(tmp_path):
    variants = sources(tmp_path)
    merge_checkpoints(variants, tmp_path / "merged")
    split_checkpoint(tmp_path / "merged", "w4a16", tmp_path / "split")
    back, before = config_of(tmp_path / "split"), config_of(variants["w4a16"])
    assert back["architectures"] == [ARCHITECTURE]
    assert back == {key: value for key, value in before.items() if key != "_name_or_path"}


def test_towers_that_differ_are_refused(tmp_path):
    other = in_float32(edit_tensor(PATCHES, lambda w: 1.01 * w))
    with refused(rf"'{PATCHES}' is not equal.*'re:\.\*vision_model\.\*'"):
        merge_checkpoints(sources(tmp_path, transform=other), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_quantised_towers_are_refused(tmp_path):
    variants = {v: make_vision_checkpoint(tmp_path / v, v, ignore=()) for v in ("w8a8", "w4a16")}
    with refused("leave 'model.vision_model' out of quantising in each"):
        merge_checkpoints(variants, tmp_path / "merged")


@pytest.mark.parametrize("kind", KINDS)
def test_language_models_that_differ_are_refused(kind, tmp_path):
    other = in_float32(edit_tensor(r"layers\.3\.self_attn\.v_proj\.weight$", torch.randn_like))
    merge_checkpoints(sources(tmp_path / "same", kind), tmp_path / "same/merged")
    with refused("layer 3"):
        merge_checkpoints(sources(tmp_path, kind, transform=other), tmp_path / "merged")


@pytest.mark.parametrize(
    ("tensor", "found"),
    [
        ("model.vision_tower.encoder.layers.0.self_attn.q_proj.weight", "model.vision_tower"),
        ("vision_tower.encoder.layers.0.self_attn.q_proj.weight", "vision_tower"),
        ("multi_modal_projector.linear_1.bias", "multi_modal_projector"),
        ("model.language_model.norm.weight", None),
        ("language_model.lm_head.weight", None),
        ("lm_head.weight", None),
    ],
)
def test_the_tower_that_a_tensor_lies_in(tensor, found):
    layer = "model.language_model.layers.0.self_attn.q_proj.weight"
    assert tower(tensor, map(above, decoder_stacks([layer, tensor]))) == found


@pytest.mark.parametrize("cast", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "first, second",
    [(torch.float16, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.float32, torch.float16)],
)
def test_what_storing_rounds_is_no_difference_after_a_cast(tmp_path, first, second, cast):
    def stored_in(dtype: torch.dtype, state: StateDict) -> StateDict:
        generator = torch.Generator().manual_seed(0)
        finer = {k: t * (1 + torch.rand(t.shape, generator=generator) / 256) for k, t in state.items()}
        return {name: tensor.to(dtype) for name, tensor in finer.items()}

    made = {}
    for name, dtype in (("w8a8", first), ("w4a16", second)):
        stored = {"transform": partial(stored_in, dtype), "dtype": str(dtype).split(".")[1]}
        made[name] = make_checkpoint(tmp_path / name, "qwen2", name, **stored)
    merge_checkpoints(made, tmp_path / "merged", dtype=cast)
    merge_checkpoints(dict(reversed(made.items())), tmp_path / "again", dtype=cast)
    for name in ("merged", "again"):
        assert read_merged_config(tmp_path / name)[0].layered_plans


def test_a_cast_hides_no_other_bias(tmp_path):
    other = in_float32(edit_tensor(r"q_proj\.bias$", lambda b: 1.05 * b))
    with refused("q_proj.bias differs by 0.0499"):
        merge_checkpoints(make_pair(tmp_path, "qwen2", other), tmp_path / "merged", dtype="float16")
