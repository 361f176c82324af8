# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What may share a KV cache and what may not, on quantised models that were folded, smoothed or rotated."""

import json
import math
import re

import pytest
import torch

from flexquant.errors import FlexQuantError
from flexquant.merge.formats import open_source
from flexquant.merge.kv.compatibility import check_kv_compatibility
from tests.checkpoints import StateDict, make_checkpoint, make_pair
from tests.publishers import edits
from tests.unit import edits as weights
from tests.unit.edits import HEAD_DIM, LAYERS, READS, WRITES, Edit, edit_tensor, factors, in_float32
from tests.unit.full_merge import opened, report, report_of


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_roundings_of_one_model_are_compatible(tmp_path, architecture, group_size):
    found = report(tmp_path, architecture=architecture, group_size=group_size)
    assert found.compatible and found.layered_plans, found
    assert found.message == "" and found.residual_messages == []
    assert set(found.worst) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    for worst in found.worst.values():
        assert 0.04 < worst["relative_error"] < 0.5 * worst["allowed"]
        assert worst["share_of_bound"] < 0.75
    json.dumps(found.to_json())


def test_int8_against_int8_has_a_tighter_bound(tmp_path):
    found = report(tmp_path, schemes=("w8a8", "w8a8"))
    assert found.layered_plans and found.worst["k_proj"]["relative_error"] == 0
    assert found.worst["k_proj"]["allowed"] < 0.06


BARE = {"input_layernorm": READS["input_layernorm"]}
GEMMA_NORMS = BARE | {"pre_feedforward_layernorm": READS["post_attention_layernorm"]}


@pytest.mark.parametrize(
    ("edit", "architecture", "schemes"),
    [
        (weights.smooth_norms(), "llama", ("w8a8", "w4a16")),
        (weights.smooth_norms(), "llama", ("w4a16", "w8a8")),
        # Their norms add one to the weight.
        (weights.smooth_norms(1.0, GEMMA_NORMS), "gemma3", ("w8a8", "w4a16")),
        (weights.smooth_norms(1.0, GEMMA_NORMS), "vaultgemma", ("w8a8", "w4a16")),
        (weights.scale_up_to_down, "llama", ("w4a16", "w8a8")),
    ],
)
def test_folds_are_compatible(tmp_path, edit, architecture, schemes):
    found = report(tmp_path, edit, architecture, schemes)
    assert found.compatible and found.layered_plans, found


def test_norms_of_an_unknown_model_have_to_be_equal(tmp_path):
    transform = in_float32(weights.smooth_norms())
    folders = make_pair(tmp_path)
    folders["smoothed"] = make_checkpoint(tmp_path / "smoothed", scheme="w4a16", transform=transform)
    for folder in folders.values():
        edits.config(model_type="my-own")(folder)
    plain, rounded, smoothed = opened(folders)
    assert check_kv_compatibility([plain, rounded]).layered_plans
    found = check_kv_compatibility([plain, smoothed])
    assert "'w8a8' and 'smoothed'" in found.message
    assert "layers.0.input_layernorm.weight' is not equal in both" in found.message


def test_another_norm_behind_attention_is_another_model(tmp_path):
    def fold(state: StateDict) -> None:
        for layer in LAYERS:
            scale = (1 + state[layer + "post_attention_layernorm.weight"]) * factors(weights.HIDDEN, 0.5, 2)
            state[layer + "post_attention_layernorm.weight"] = scale - 1

    said = r"layer 0 post_attention_layernorm.weight differs by .* changes the layer's output"
    assert re.search(said, report(tmp_path, fold, "gemma3").message)


@pytest.mark.parametrize("low,high", [(0.7, 1.4), (0.8, 1.25)])
@pytest.mark.parametrize("schemes", [("w8a8", "w4a16"), ("w4a16", "w8a8")])
def test_v_to_o_smoothing_is_caught(tmp_path, low, high, schemes):
    found = report(tmp_path, weights.smooth_v_to_o(low, high), schemes=schemes)
    assert not found.compatible and not found.layered_plans
    pattern = r"'first' and 'second' .*layer 0 self_attn.v_proj .*gain error of row \d+ 0\.\d+, allowed"
    assert re.search(pattern, found.message)


def one_layers_rotated_heads(state: StateDict) -> None:
    weights.rotate_head_rows(state, LAYERS[1] + "self_attn.v_proj.weight", weights.orthogonal(HEAD_DIM))


def one_small_rotated_head(state: StateDict) -> None:
    v = state[LAYERS[0] + "self_attn.v_proj.weight"]
    v[HEAD_DIM:] = weights.orthogonal(HEAD_DIM) @ v[HEAD_DIM:]


def rotated_residual_and_heads(state: StateDict) -> None:
    weights.rotate_residual(state)
    weights.rotate_q_and_k(state)


@pytest.mark.parametrize(
    ("edit", "architecture", "where"),
    [
        (weights.rotate_v_and_o, "llama", "layer 0 self_attn.v_proj"),
        (weights.rotate_q_and_k, "llama", "layer 0 self_attn.k_proj"),
        (one_layers_rotated_heads, "llama", "layer 1 self_attn.v_proj"),
        (one_small_rotated_head, "llama", "layer 0 self_attn.v_proj"),
        (rotated_residual_and_heads, "llama", "layer 0 self_attn.k_proj"),
        (weights.smooth_norms(compensate=False), "llama", "layer 0 self_attn.k_proj"),
        (weights.smooth_norms(compensate=False, low=0.8, high=1.25), "llama", "layer 0 self_attn.k_proj"),
        (weights.smooth_norms(0.0, BARE), "gemma3", "layer 0 self_attn.k_proj"),
        (edit_tensor(r"k_proj\.weight", torch.randn_like), "llama", "layer 0 self_attn.k_proj"),
    ],
)
def test_another_cache_is_caught_and_named(tmp_path, edit, architecture, where):
    """By rotated heads, of one layer or one head too, changed norms and other weights."""
    found = report(tmp_path, edit, architecture)
    assert where in found.message and "quantise both" in found.message


def test_a_column_counts_however_small_its_inputs_are(tmp_path):
    def quiet(state: StateDict) -> StateDict:
        state[f"{LAYERS[1]}input_layernorm.weight"][::4] = 1e-4
        return state

    def edited(state: StateDict) -> StateDict:
        quiet(state)[f"{LAYERS[1]}self_attn.k_proj.weight"][:, ::4] *= -1
        return state

    sources = {t.__name__: make_checkpoint(tmp_path / t.__name__, transform=t) for t in (quiet, edited)}
    found = check_kv_compatibility(opened(sources))
    assert "layer 1 self_attn.k_proj differs by more than quantisation noise" in found.message


def test_rotation_of_the_cache_in_one_variant_is_caught(tmp_path):
    folders = make_pair(tmp_path)
    r3 = {"type": "hadamard", "apply": [{"targets": ["self_attn"], "location": "k_cache"}]}
    edits.section(transform_config={"config_groups": {"R3": r3}})(folders["w4a16"])
    found = check_kv_compatibility(opened(folders))
    assert not found.compatible and "rotation of the KV cache is {} in 'w8a8' and {'R3'" in found.message


@pytest.mark.parametrize(("low", "high"), [(0.9, 1.1), (1.04, 1.04)])
def test_other_k_norm_is_caught(tmp_path, low, high):
    """Rounding to bfloat16 explains a share of 6 / 256."""
    edit = edit_tensor(r"layers\.1\.self_attn\.k_norm", lambda w: w * factors(HEAD_DIM, low, high))
    assert "layer 1 self_attn.k_norm" in report(tmp_path, edit, "qwen3").message


@pytest.mark.parametrize("projection", ["k_proj", "v_proj"])
def test_other_bias_is_caught(tmp_path, projection):
    edit = edit_tensor(rf"layers\.1\.self_attn\.{projection}\.bias", lambda b: 1.1 * b)
    message = report(tmp_path, edit, "qwen2").message
    found = re.search(rf"layer 1 self_attn.{projection}\.bias differs by ([\d.]+)", message)
    assert found is not None, message
    assert float(found[1]) == pytest.approx(0.1, rel=0.02)  # the biases are bf16


def test_an_outlier_hides_nothing(tmp_path):
    def with_outlier(factor: float) -> Edit:
        return edit_tensor(r"k_proj\.bias", lambda b: (factor * b).index_fill(0, torch.tensor([5]), 300))

    edited = {"w8a8": 1, "w4a16": 1, "fp8": 1.5}
    edited = {scheme: in_float32(with_outlier(factor)) for scheme, factor in edited.items()}
    folders = {s: make_checkpoint(tmp_path / s, "qwen2", s, transform=edit) for s, edit in edited.items()}
    first, same, other = opened(folders)
    assert check_kv_compatibility([first, same]).layered_plans
    assert "layer 0 self_attn.k_proj.bias differs" in check_kv_compatibility([first, other]).message


def test_parameters_may_be_rounded_to_another_dtype(tmp_path):
    """A fold that is stored in bf16 errs in every norm, and biases may be in fp16."""

    def rounded(state: StateDict) -> None:
        for tensor in state.values():
            if tensor.ndim == 1:
                tensor *= 1 + 2.0**-9 * torch.randn_like(tensor).clamp(-2, 2)

    found = report(tmp_path, rounded, "qwen3", schemes=("w8a8", "w8a8"))
    assert found.layered_plans, found


def test_what_no_layer_reads_has_to_be_equal(tmp_path):
    def sink(value: float) -> edits.Edit:
        return edits.tensors(lambda s: s.update({f"{LAYERS[1]}self_attn.sink": torch.tensor([value])}))

    folders = make_pair(tmp_path)
    for folder in folders.values():
        sink(1.0)(folder)
    assert check_kv_compatibility(opened(folders)).layered_plans
    sink(2.0)(folders["w4a16"])
    message = check_kv_compatibility(opened(folders)).message
    assert "'model.layers.1.self_attn.sink' is not equal in both" in message


@pytest.mark.parametrize("schemes", [("w8a8", "w4a16"), ("w4a16", "w8a8")])
def test_rotated_residual_shares_the_cache_but_not_layers(tmp_path, schemes):
    found = report(tmp_path, weights.rotate_residual, schemes=schemes)
    assert found.compatible and not found.layered_plans, found
    assert "residual streams lie in different bases" in found.residual_messages[0]
    assert found.worst["k_proj"]["relative_error"] < 0.2


def test_variants_rotated_alike_may_be_mixed_with_one_another(tmp_path):
    rotate = in_float32(weights.rotate_residual)
    folders = make_pair(tmp_path) | {
        "spin4": make_checkpoint(tmp_path / "spin4", scheme="w4a16", transform=rotate),
        "spin8": make_checkpoint(tmp_path / "spin8", scheme="w8a8", transform=rotate),
    }
    found = check_kv_compatibility(opened(folders))
    assert found.compatible and not found.layered_plans, found
    assert sorted(map(sorted, found.mixable)) == [["spin4", "spin8"], ["w4a16", "w8a8"]]
    assert len(found.residual_messages) == 2, "spin4 and spin8, each against w8a8"


QUANTISED = [(name, ()) for name in (*WRITES, "self_attn.q_proj", "mlp.gate_proj")]


@pytest.mark.parametrize(("name", "in_16_bit"), [*QUANTISED, (WRITES[1], WRITES[1:])])
def test_matrices_that_differ_by_more_than_noise_forbid_mixing(tmp_path, name, in_16_bit):
    def some_rows_larger(weight: torch.Tensor) -> torch.Tensor:
        weight[::20] *= 1.5
        return weight

    edit = edit_tensor(rf"layers\.1\.{name}\.weight", some_rows_larger)
    found = report(tmp_path, edit, schemes=("w4a16", "w8a8"), ignore=[f"re:.*{n}" for n in in_16_bit])
    assert found.compatible and not found.layered_plans
    assert f"layer 1 {name}" in found.residual_messages[0] and found.message == ""


@pytest.mark.parametrize("name", [*WRITES, "self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj"])
@pytest.mark.parametrize("schemes", [("w8a8", "w4a16"), ("w8a8", "w8a8")])
def test_matrices_of_another_model_are_refused(tmp_path, name, schemes):
    """In INT8 a third of the columns is enough; in INT4 so many may be noise."""

    def other(weight: torch.Tensor) -> torch.Tensor:
        if "w4a16" in schemes:
            return weight @ weights.orthogonal(weight.shape[1])
        third = weight.shape[1] // 3
        return torch.cat([weight[:, :third] * factors(third, 0.2, 2), weight[:, third:]], 1)

    found = report(tmp_path, edit_tensor(rf"layers\.1\.{name}\.weight", other), schemes=schemes)
    assert f"layer 1 {name}" in found.message


def test_what_all_layers_compute_with_has_to_be_equal(tmp_path):
    larger = in_float32(edit_tensor("per_layer_projection_norm", lambda w: 3 * w))
    message = report_of(tmp_path, "gemma4_text", larger).message
    assert "per_layer_projection_norm.weight', which all layers compute with, is not equal" in message


def test_another_model_is_caught(tmp_path):
    assert "not copies of one model" in report(tmp_path, seed=1).message


def test_one_token_that_was_trained_further_is_caught(tmp_path):
    def trained_further(embeddings: torch.Tensor) -> torch.Tensor:
        embeddings[77] += 0.2 * embeddings[77].std() * torch.randn(embeddings.shape[1])
        return embeddings

    found = report(tmp_path, edit_tensor("embed_tokens", trained_further))
    assert "the embedding of token 77" in found.message and "not copies of one model" in found.message


def test_embeddings_in_another_16_bit_dtype_are_the_same(tmp_path):
    def almost_zero(state: StateDict) -> StateDict:
        state["model.embed_tokens.weight"][5] = 1e-9
        return state

    folders = {s: make_checkpoint(tmp_path / s, scheme=s, transform=almost_zero) for s in ("w8a8", "w4a16")}
    name = "model.embed_tokens.weight"
    edits.tensors(lambda state: state.update({name: state[name].half()}))(folders["w8a8"])
    found = check_kv_compatibility(opened(folders))
    assert found.layered_plans, found.message


@pytest.mark.parametrize(
    ("scales", "refused"),
    [
        ((torch.tensor([0.5]), torch.tensor([0.25])), True),
        ((torch.tensor([0.5]), torch.tensor(0.5)), False),
        ((torch.tensor([0.5]), torch.tensor([0.5], dtype=torch.bfloat16)), False),
        ((torch.tensor([math.nan]), torch.tensor([math.nan])), True),
    ],
    ids=["other", "without an axis", "in another dtype", "not a number"],
)
def test_cache_scales_must_have_equal_values(tmp_path, scales, refused):
    folders = make_pair(tmp_path)
    for folder, scale in zip(folders.values(), scales, strict=True):
        of_layers = {f"{layer}self_attn.k_scale": scale.clone() for layer in LAYERS}
        edits.tensors(lambda state, added=of_layers: state.update(added))(folder)
    found = check_kv_compatibility(opened(folders))
    assert found.compatible != refused
    assert refused == ("the cache scale 'model.layers.0.self_attn.k_scale' differs" in found.message)


@pytest.mark.parametrize("name", ["w8a8", "w4a16"])
def test_a_cache_scale_of_one_variant_alone_is_caught(tmp_path, name):
    folders = make_pair(tmp_path)
    scale = {f"{LAYERS[1]}self_attn.v_scale": torch.tensor([0.5])}
    edits.tensors(lambda state: state.update(scale))(folders[name])
    found = check_kv_compatibility(opened(folders))
    assert f"only '{name}' has the cache scale 'model.layers.1.self_attn.v_scale'" in found.message


def test_the_third_source_is_compared_too_and_one_is_compatible_with_itself(tmp_path):
    folders = make_pair(tmp_path)
    rotate, calls = in_float32(weights.rotate_v_and_o), []
    folders["c"] = make_checkpoint(tmp_path / "c", scheme="w4a16", transform=rotate)
    found = check_kv_compatibility(opened(folders), progress=lambda *done: calls.append(done))
    assert "'w8a8' and 'c'" in found.message and calls == [(1, 4), (2, 4)]
    assert check_kv_compatibility([open_source("a", make_checkpoint(tmp_path / "a"))]).layered_plans


def with_nan(weight: torch.Tensor) -> torch.Tensor:
    weight[3, 5] = torch.nan
    return weight


@pytest.mark.parametrize(
    ("name", "change", "second"),
    [
        (r"self_attn.v_proj", with_nan, "w4a16"),
        (r"self_attn.v_proj", with_nan, "w8a8"),
        (r"input_layernorm", lambda w: torch.full_like(w, torch.nan), "w4a16"),
        (r"input_layernorm", lambda w: torch.full_like(w, torch.inf), "w4a16"),
    ],
)
def test_what_is_not_finite_is_named(tmp_path, name, change, second):
    with pytest.raises(FlexQuantError, match=rf"layers.1.{name}(.weight)?' of variant 'second' holds NaN"):
        report(tmp_path, edit_tensor(rf"layers\.1\.{name}", change), schemes=("w8a8", second))
