# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Merging mixtures of experts, and latent attention: what is compared beside K and V, what is stored once."""

from __future__ import annotations

import pytest
import torch

from flexquant.checkpoint.merged_config import read_merged_config
from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints
from tests.checkpoints import EXPERTS, StateDict, make_checkpoint, make_pair

NORM = "post_attention_layernorm.weight"


def test_a_norm_folded_into_router_and_experts_is_the_same_model(tmp_path):
    def folded(state: StateDict) -> StateDict:
        norms = {name.removesuffix(NORM): t.float() for name, t in state.items() if name.endswith(NORM)}
        readers = ("mlp.gate.weight", "gate_proj.weight", "up_proj.weight")
        return {
            name: torch.ones_like(tensor)
            if name.endswith(NORM)
            else (tensor * norms[name.split("mlp.")[0]]).bfloat16()
            if name.endswith(readers)
            else tensor
            for name, tensor in state.items()
        }

    merge_checkpoints(make_pair(tmp_path, "qwen3_moe", folded), tmp_path / "merged")
    assert read_merged_config(tmp_path / "merged")[0].layered_plans


@pytest.mark.parametrize(
    ("kind", "up", "down"), [("qwen3_moe", "up_proj", "down_proj"), ("mixtral", "w3", "w2")]
)
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
    def other(state: StateDict) -> StateDict:
        name = "model.layers.1.mlp.gate.weight"
        return state | {name: state[name].roll(1, dims=0)}

    with pytest.raises(FlexQuantError, match="layer 1 mlp.gate differs"):
        merge_checkpoints(make_pair(tmp_path, "qwen3_moe", other), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_another_number_of_experts_is_another_model(tmp_path):
    sources = make_pair(tmp_path, "qwen3_moe")
    sources["w4a16"] = make_checkpoint(tmp_path / "other", "qwen3_moe", "w4a16", num_experts=4)
    with pytest.raises(FlexQuantError, match=r"experts: 8 against 4"):
        merge_checkpoints(sources, tmp_path / "merged")


def test_other_experts_cannot_be_mixed(tmp_path):
    def other(state: StateDict) -> StateDict:
        name = "model.layers.0.mlp.experts.3.down_proj.weight"
        state[name][::20] *= 1.5
        return state

    merge_checkpoints(make_pair(tmp_path, "qwen3_moe", other), tmp_path / "merged")
    merged = read_merged_config(tmp_path / "merged")[0]
    assert not merged.layered_plans
    assert "mlp.experts.3.down_proj" in merged.kv_compatibility["residual_message"]


def test_what_expands_a_latent_cache_is_held_once(tmp_path):
    merge_checkpoints(make_pair(tmp_path, "deepseek_v2"), tmp_path / "merged")
    shared = read_merged_config(tmp_path / "merged")[0].shared_modules
    assert [name for name in shared if ".layers." in name] == [
        f"model.layers.{layer}.self_attn.kv_b_proj" for layer in (0, 1)
    ]


def test_only_experts_that_are_all_equal_are_held_once(tmp_path):
    def other(state: StateDict) -> StateDict:
        name = "model.layers.0.mlp.experts.3.up_proj.weight"
        return state | {name: state[name] * 1.01}

    merge_checkpoints(make_pair(tmp_path, "qwen3_moe", other, ignore=[EXPERTS]), tmp_path / "merged")
    shared = read_merged_config(tmp_path / "merged")[0].shared_modules
    assert "model.layers.1.mlp.experts" in shared
    assert not any(name.startswith("model.layers.0.") for name in shared)
