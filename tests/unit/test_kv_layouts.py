# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The comparison of layers of other forms than Llama's: latents, fused or rotated matrices, other names."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flexquant.checkpoint.merged_config import read_merged_config
from flexquant.checkpoint.weight_bytes import describe_scheme
from flexquant.merge import merge_checkpoints
from flexquant.merge.formats import open_source
from flexquant.merge.kv.compatibility import check_kv_compatibility
from flexquant.merge.kv.dequantize import WeightReader
from tests.checkpoints import StateDict, make_checkpoint, make_pair
from tests.foreign import config_of
from tests.publishers import edits
from tests.refusals import refused
from tests.rotations import BLOCK, make_rotated, rotation
from tests.unit import edits as weights
from tests.unit.edits import HEAD_DIM, HIDDEN, LAYERS, Edit, edit_tensor, in_float32
from tests.unit.full_merge import model_of, opened, report, report_of


def test_latent_attention_is_compared_by_what_it_caches(tmp_path):
    found = report(tmp_path, architecture="deepseek_v2")
    assert found.compatible and found.layered_plans, found
    latent = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}
    assert set(found.worst) == {*latent, "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("module", "edit", "found"),
    [
        ("kv_a_proj_with_mqa", lambda w: w.roll(1, dims=0), "kv_a_proj_with_mqa differs by more than"),
        ("kv_a_layernorm", lambda w: 0.9 * w, "self_attn.kv_a_layernorm.weight differs by"),
        ("kv_b_proj", lambda w: 1.01 * w, "kv_b_proj, which expands the cached latent .* is not the same"),
    ],
)
def test_another_latent_cache_is_caught(tmp_path, module, edit, found):
    edit = edit_tensor(rf"layers\.1\.self_attn\.{module}", edit)
    assert re.search(f"layer 1 .*{found}", report(tmp_path, edit, "deepseek_v2").message)


def test_sparse_attention_is_refused_for_its_second_cache(tmp_path):
    """DeepSeek-V3.2 chooses what it attends to with an indexer, which caches keys of its own."""
    indexer = {"model.layers.0.self_attn.indexer.wk.weight": torch.ones(128, 128, dtype=torch.bfloat16)}
    with refused(r"a cache of its own in .*\.self_attn\.indexer\.wk"):
        report_of(tmp_path, "deepseek_v3", lambda state: state, indexer)


def test_another_kind_of_attention_is_caught(tmp_path):
    def plain(state: StateDict) -> StateDict:
        return {n.replace("kv_a_proj_with_mqa", f"{p}_proj"): t for n, t in state.items() for p in "kv"}

    with refused("'w4a16' has no weight for 'self_attn.kv_a_proj_with_mqa'"):
        check_kv_compatibility(opened(make_pair(tmp_path, "deepseek_v2", plain)))


@pytest.mark.parametrize(("spread", "named"), [(0.0, False), (0.0625, True)])
def test_a_routers_bias_has_to_be_equal_however_large_it_is(tmp_path, spread, named):
    """DeepSeek-V3's biases lie around one large number, and their small differences choose the experts."""
    published = model_of("deepseek_v3")[1]
    biases = [name for name in published if name.endswith("e_score_correction_bias")]
    large = dict.fromkeys(biases, torch.full_like(published[biases[0]], 7.5))

    def spread_out(state: StateDict) -> StateDict:
        return state | {n: state[n] + spread * (torch.arange(len(state[n])) % 2) for n in biases}

    message = report_of(tmp_path, "deepseek_v3", spread_out, large).message
    assert ("mlp.gate.e_score_correction_bias, which helps to choose experts, differs" in message) is named


@pytest.mark.parametrize("architecture", ["gemma4_text", "mimo_v2_flash"])
def test_every_row_is_compared_where_layers_have_heads_of_other_sizes(tmp_path, architecture):
    def last_row_turned(state: StateDict) -> StateDict:
        wide = [n for n, t in state.items() if "self_attn.v_proj" in n and t.shape[0] == 128]
        return state | {n: torch.cat([state[n][:-1], -state[n][-1:]]) for n in wide}

    own = {"gemma4_text": {"global_head_dim": 64}, "mimo_v2_flash": {"swa_num_key_value_heads": 4}}
    message = report_of(tmp_path, architecture, last_row_turned, **own[architecture]).message
    assert "self_attn.v_proj differs" in message and "row 127" in message


def test_fused_projections_are_split(tmp_path):
    """Phi-3's layout has one qkv_proj and one gate_up_proj."""

    def fuse(state: StateDict) -> None:
        for layer in LAYERS:
            for fused, parts in (("self_attn.qkv", ("q", "k", "v")), ("mlp.gate_up", ("gate", "up"))):
                block = layer + fused.split(".")[0]
                for suffix in ("weight", "weight_scale", "weight_packed"):
                    names = [f"{block}.{part}_proj.{suffix}" for part in parts]
                    if names[0] in state:
                        state[f"{layer}{fused}_proj.{suffix}"] = torch.cat([state.pop(n) for n in names])
                shapes = [state.pop(f"{block}.{part}_proj.weight_shape", None) for part in parts]
                if shapes[0] is not None:
                    rows = sum(int(shape[0]) for shape in shapes)
                    state[f"{layer}{fused}_proj.weight_shape"] = torch.tensor([rows, HIDDEN])

    folders = make_pair(tmp_path, change=in_float32(weights.scale_up_to_down))
    smoothed = in_float32(weights.smooth_v_to_o(0.7, 1.4))
    folders["smoothed"] = make_checkpoint(tmp_path / "smoothed", scheme="w4a16", transform=smoothed)
    for folder in folders.values():
        edits.tensors(fuse)(folder)
        edits.config(model_type="phi3", architectures=["Phi3ForCausalLM"])(folder)
    reference, good, bad = opened(folders)
    found = check_kv_compatibility([reference, good])
    assert found.layered_plans, found
    message = check_kv_compatibility([reference, bad]).message
    assert "layer 0 self_attn.qkv_proj" in message and "gain error of row" in message


@pytest.mark.parametrize(
    ("kind", "config", "first_of_k"),
    [
        ("gpt_neox", {}, 32),  # Q, K and V of each head
        ("falcon", {}, 128),  # all Q, one K, one V
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, 64),  # Q of two heads, a K, a V
        ("falcon", {"multi_query": False}, 32),
    ],
)
def test_rows_of_k_and_v_are_compared_in_every_fused_layout(tmp_path, kind, config, first_of_k):
    """After 32 rows of K, a head's size, come those of V."""

    def with_larger(row: int, state: StateDict) -> StateDict:
        (name,) = (n for n in state if ".h.0." in n or ".layers.0." in n if "query_key_value.weight" in n)
        factor = torch.ones(len(state[name]), 1, dtype=torch.bfloat16)
        factor[row] = 2
        return state | {name: state[name] * factor}

    for row in (first_of_k + 5, first_of_k + HEAD_DIM + 6):
        message = report_of(tmp_path / str(row), kind, partial(with_larger, row), **config).message
        assert "cannot share a KV cache" in message and f"row {row} " in message


def test_a_layer_without_plain_attention_names_what_was_looked_for(tmp_path):
    folders = make_pair(tmp_path)
    edits.tensors(with_other_names("k_proj", "kv_b_proj"))(folders["w8a8"])
    with refused("layer 0 of variant 'w8a8' has no weight for 'self_attn.k_proj'"):
        check_kv_compatibility(opened(folders))


def with_other_names(part: str, other: str) -> Edit:
    def edit(state: StateDict) -> None:
        for name in [name for name in state if part in name]:
            state[name.replace(part, other)] = state.pop(name)

    return edit


def test_layers_like_none_that_transformers_has_are_refused(tmp_path):
    folders = make_pair(tmp_path)
    for folder in folders.values():
        edits.config(model_type="my-own")(folder)
        edits.tensors(with_other_names("mlp.gate_proj", "mlp.gate"))(folder)
    with refused("cannot build the LlamaForCausalLM .*my-own.* llama, qwen3, phi3"):
        check_kv_compatibility(opened(folders))


DOWN = "model.layers.{}.mlp.down_proj"


def rotated_and_plain(folder: Path, *matrix: torch.Tensor) -> dict[str, Path]:
    rotated = make_rotated(folder / "w8a8", "w8a8", *matrix)
    return {"w8a8": rotated, "w4a16": make_checkpoint(folder / "w4a16", scheme="w4a16")}


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16", "fp8"])
def test_the_matrix_and_its_noise_are_those_before_the_rotation(tmp_path, scheme):
    plain = load_file(make_checkpoint(tmp_path / "plain", scheme=None) / "model.safetensors")
    reader = WeightReader(open_source("rotated", make_rotated(tmp_path / "rotated", scheme)))
    for layer in range(2):
        read, expected = reader.open(DOWN.format(layer)).read(), plain[f"{DOWN.format(layer)}.weight"].float()
        assert 0.7 < (read.matrix() - expected).square().mean() / read.variances().mean() < 1.4
    part = reader.open(DOWN.format(0)).read([range(3, 9)]).matrix()
    assert torch.equal(part, reader.open(DOWN.format(0)).read().matrix()[3:9])


def test_layers_of_rotated_and_plain_linears_mix(tmp_path):
    sources = rotated_and_plain(tmp_path)
    merge_checkpoints(sources, tmp_path / "merged")
    merged, _ = read_merged_config(tmp_path / "merged")
    section = merged.variants["w8a8"].quantization_config
    section["config_groups"]["group_0"]["input_activations"]["symmetric"] = False
    assert describe_scheme(section).endswith("activations (token, dynamic, asymmetric); rotated in each pass")
    assert [sorted(group) for group in merged.mixable_groups] == [["w4a16", "w8a8"]]
    with refused("cannot be nested in 'w4a16': each pass rotates the inputs of .* 'w8a8'"):
        merge_checkpoints(sources, tmp_path / "nested", nested="near")


def test_rotations_that_vllm_leaves_out_are_refused(tmp_path):
    folder = make_rotated(tmp_path / "w8a8", "w8a8")
    transforms = config_of(folder)["quantization_config"]["transform_config"]
    (group,) = transforms["config_groups"].values()
    group["apply"][0]["targets"] = ["re:.*(down_proj|lm_head|embed_tokens)$"]
    edits.section(transform_config=transforms)(folder)
    reader = WeightReader(open_source("rotated", folder))
    with refused("'lm_head' .* are rotated by its config, and not by vLLM"):
        reader.open("lm_head")
    reader.open("model.embed_tokens")  # looked up, and not multiplied


@pytest.mark.parametrize(
    ("matrix", "problem"),
    [
        (rotation(1), r"layer 0 mlp\.down_proj"),
        (torch.ones(2 * BLOCK, 2 * BLOCK), r"by 'v', whose matrix \[32, 32\] is not"),
    ],
    ids=["another", "of another size"],
)
def test_a_matrix_that_does_not_belong_to_the_weights_is_found(tmp_path, matrix, problem):
    with refused(problem):
        merge_checkpoints(rotated_and_plain(tmp_path, matrix), tmp_path / "merged")
