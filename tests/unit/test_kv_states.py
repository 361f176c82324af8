# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Which variants may share states (linear attention, state spaces, short convolutions), and which may not."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flexquant.merge import merge_checkpoints
from flexquant.merge.kv.compatibility import KVReport
from tests.checkpoints import StateDict, write_checkpoint
from tests.publishers import edits
from tests.refusals import refused
from tests.unit.edits import Edit, edit_tensor, in_float32, orthogonal
from tests.unit.full_merge import compare_and_refuse, model_of, opened

KEY_HEADS, KEY, VALUE = 2, 128, 128
"""Qwen3-Next's heads: each of the keys has two of the values, behind one another in in_proj_qkvz."""
STATES = {
    "qwen3_next": ("in_proj_qkvz", "in_proj_ba"),
    "qwen3_5_text": ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"),
    "falcon_h1": ("in_proj", "k_proj"),
    **dict.fromkeys(("granitemoehybrid", "nemotron_h", "lfm2", "bamba"), ("in_proj",)),
    "jamba": ("in_proj", "x_proj", "dt_proj"),
    "kimi_linear": ("f_a_proj", "f_b_proj", "b_proj", "kv_a_proj_with_mqa"),
    "olmo_hybrid": ("a_proj", "b_proj"),
}
"""Model type -> some of the matrices that reach its states."""


def write_pair(
    folder: Path, edit: Edit | None = None, kind="qwen3_next", schemes=("w8a8", "w4a16"), of_both=None, too=()
) -> dict[str, Path]:
    """Write a variant and an edited one, after an edit of both; quantise the matrices in ``too`` in it."""
    model, published, quantised, left_out = model_of(kind)
    if of_both is not None:
        published = in_float32(of_both)(published)
    edited = published if edit is None else in_float32(edit)(published)
    also = {name for name in published if name.endswith(tuple(f"{one}.weight" for one in too))}
    ignored = [name for name in left_out if not name.endswith(too)] if too else left_out
    a = write_checkpoint(folder / "a", model.config, published, schemes[0], quantised, left_out)
    b = write_checkpoint(folder / "b", model.config, edited, schemes[1], quantised | also, ignored)
    return {"first": a, "second": b}


def report(folder: Path, *args: Any, **options: Any) -> KVReport:
    return compare_and_refuse(opened(write_pair(folder, *args, **options)), folder / "out")


def rows(name: str, change: Callable[[torch.Tensor], torch.Tensor], which: slice) -> Edit:
    """Return an edit of the first layer's rows of one of the parts of each key head: q, k, v and z."""

    def edit(state: StateDict) -> None:
        weight = state[f"model.layers.0.linear_attn.{name}.weight"]
        parts = weight.view(KEY_HEADS, -1, weight.shape[-1])
        parts[:, which] = change(parts[:, which])

    return edit


V, Z = slice(2 * KEY, 2 * KEY + 2 * VALUE), slice(2 * KEY + 2 * VALUE, None)


@pytest.mark.parametrize("kind", STATES)
def test_variants_of_a_model_with_states_share_them(kind, tmp_path):
    pair = write_pair(tmp_path, kind=kind)
    found = compare_and_refuse(opened(pair), tmp_path / "out")
    assert found.compatible and found.layered_plans, found
    assert found.worst.keys() >= {*STATES[kind]}
    merge_checkpoints({"w8a8": pair["first"], "w4a16": pair["second"]}, tmp_path / "merged")


@pytest.mark.parametrize("schemes", [("w8a8", "w4a16"), ("w4a16", "w8a8")])
@pytest.mark.parametrize("name", ["in_proj_qkvz", "in_proj_ba"])
def test_another_models_projection_into_the_state_is_refused(name, schemes, tmp_path):
    other = edit_tensor(rf"layers\.1\.linear_attn\.{name}", lambda w: torch.randn_like(w) * w.std())
    message = report(tmp_path, other, schemes=schemes).message
    assert f"layer 1 linear_attn.{name} differs by more than quantisation noise" in message


@pytest.mark.parametrize(
    ("kind", "parameter"),
    [("qwen3_next", "linear_attn.dt_bias"), ("jamba", "mamba.b_layernorm.weight")]
    + [("lfm2", "conv.conv.weight"), ("falcon_h1", "mamba.D")],
)
def test_another_parameter_is_refused(kind, parameter, tmp_path):
    """In test_kv_proof each parameter of each architecture is changed."""
    edit = edit_tensor(rf"layers\.0\.{re.escape(parameter)}$", lambda p: p + 0.2 * torch.randn_like(p))
    assert f"layer 0 {parameter} differs by" in report(tmp_path, edit, kind).message


def slow_head(state: StateDict) -> None:
    """Let the first head forget so little that its decay hardly shows in some tens of tokens."""
    state["model.layers.0.linear_attn.A_log"][0] = -6.0
    state["model.layers.0.linear_attn.dt_bias"][0] = -4.0


def test_a_difference_that_shows_after_many_tokens_only_is_refused(tmp_path):
    slower = edit_tensor(r"layers\.0\.linear_attn\.A_log", lambda a: a * torch.tensor([1.05, 1, 1, 1]))
    message = report(tmp_path, slower, of_both=slow_head).message
    assert "layer 0 linear_attn.A_log, which a state is computed with, where a difference adds up" in message


def test_parameters_of_a_state_may_be_rounded(tmp_path):
    def rounded(state: StateDict) -> None:
        for name, tensor in state.items():
            if name.endswith(("A_log", "dt_bias", "conv1d.weight")):
                tensor *= 1 + 2.0**-9 * torch.randn_like(tensor).sign()

    assert report(tmp_path, rounded, of_both=slow_head).layered_plans


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        # The norm behind the state undoes a factor of all of a head's values.
        (rows("in_proj_qkvz", lambda v: 1.5 * v, V), "in_proj_qkvz differs by more than quantisation noise"),
        (rows("in_proj_qkvz", lambda v: v * torch.linspace(0.7, 1.4, 2 * VALUE)[:, None], V), "in_proj_qkvz"),
        (rows("in_proj_ba", lambda b: 0.5 * b, slice(0, 2)), "in_proj_ba"),
        (rows("in_proj_ba", lambda a: 2 * a, slice(2, 4)), "in_proj_ba"),
        (rows("in_proj_qkvz", lambda v: orthogonal(2 * VALUE) @ v, V), "in_proj_qkvz"),
    ],
    ids=["v larger", "v smoothed", "input gate", "forget gate", "v rotated"],
)
def test_what_the_state_holds_is_not_scaled_in_one_variant(edit, named, tmp_path):
    message = report(tmp_path, edit).message
    assert re.search(rf"layer 0 linear_attn.{named}", message), message


def test_rows_that_reach_the_recurrent_state_alone_are_held_to_its_bounds(tmp_path):
    """Steps of time pass no convolution; rows that reach nothing would forbid mixing only."""

    def two_heads(weight: torch.Tensor) -> torch.Tensor:
        weight[-2:] *= 1.5
        return weight

    message = report(tmp_path, edit_tensor(r"layers\.0\.mamba\.in_proj", two_heads), "falcon_h1").message
    assert re.search(r"layer 0 mamba.in_proj .*gain error of row 57[45]", message)


def test_a_gate_is_compared_though_another_layers_head_forgets_at_once(tmp_path):
    """Which rows reach a state is found in one layer; here its first head forgets all from token to token."""

    def forgetful(state: StateDict) -> None:
        state["model.layers.0.linear_attn.A_log"][0] = 6.0
        state["model.layers.0.linear_attn.dt_bias"][0] = 9.0

    def weaker(state: StateDict) -> None:
        state["model.layers.1.linear_attn.in_proj_ba.weight"][2] *= 0.85  # b, b, a, a of the first two heads

    found = report(tmp_path, weaker, of_both=forgetful, too=("in_proj_ba",))
    assert "layer 1 linear_attn.in_proj_ba" in found.message


def test_scales_do_not_move_from_the_projection_into_the_convolution(tmp_path):
    def moved(state: StateDict) -> None:
        rows("in_proj_qkvz", lambda v: v / 1.3, V)(state)
        state["model.layers.0.linear_attn.conv1d.weight"][2 * KEY_HEADS * KEY :] *= 1.3

    assert "layer 0 linear_attn.conv1d.weight differs" in report(tmp_path, moved).message


def test_scales_do_not_move_into_a_short_convolution(tmp_path):
    """LFM2's layer convolves b * x: a factor of x's rows is undone by the convolution's weights."""

    def moved(state: StateDict) -> None:
        state["model.layers.0.conv.in_proj.weight"][2 * 128 :] *= 1.15
        state["model.layers.0.conv.conv.weight"] /= 1.15

    message = report(tmp_path, moved, "lfm2").message
    assert "layer 0 conv.in_proj differs" in message or "layer 0 conv.conv.weight differs" in message


def test_a_norm_may_be_folded_into_all_that_reads_it(tmp_path):
    def fold(state: StateDict) -> None:
        norm = state["model.layers.0.input_layernorm.weight"]
        scale = torch.empty_like(norm).uniform_(0.5, 2)
        norm.copy_((1 + norm) / scale - 1)
        for name in ("in_proj_qkvz", "in_proj_ba"):
            state[f"model.layers.0.linear_attn.{name}.weight"] *= scale

    assert report(tmp_path, fold).layered_plans


def test_the_gate_of_the_output_does_not_reach_the_state(tmp_path):
    def some_rows_larger(z: torch.Tensor) -> torch.Tensor:
        z[:, ::20] *= 1.5
        return z

    found = report(tmp_path, rows("in_proj_qkvz", some_rows_larger, Z))
    assert found.compatible and not found.layered_plans
    assert "layer 0 linear_attn.in_proj_qkvz" in found.residual_messages[0]


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text", "jamba", "kimi_linear"])
def test_gates_may_be_quantised_in_one_variant_alone_since_that_is_noise(kind, tmp_path):
    left = {"jamba": ("x_proj",), "kimi_linear": ("f_a_proj", ".b_proj")}
    gates = left.get(kind, ("in_proj_ba", "in_proj_a", "in_proj_b"))
    found = report(tmp_path, kind=kind, schemes=("w4a16", "w8a8"), too=gates)
    assert found.layered_plans, found
    quantised = [found.worst[gate.strip(".")] for gate in gates if gate.strip(".") in found.worst]
    assert quantised and all(0 < one["relative_error"] < one["allowed"] for one in quantised)


@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1", "lfm2"])
def test_one_variant_may_leave_all_around_its_states_in_16_bit(kind, tmp_path):
    """Publishers often do: llm-compressor's example for Qwen3-Next ignores all of linear_attn."""
    model, published, quantised, left_out = model_of(kind)
    inside = {name for name in quantised if re.search(r"\.(linear_attn|mamba|conv)\.", name)}
    ignored = [*left_out, *(name.removesuffix(".weight") for name in inside)]
    a = write_checkpoint(tmp_path / "a", model.config, published, "w8a8", quantised - inside, ignored)
    b = write_checkpoint(tmp_path / "b", model.config, published, "w4a16", quantised, left_out)
    found = compare_and_refuse(opened({"first": a, "second": b}), tmp_path / "out")
    assert inside and found.layered_plans, found


def test_another_number_of_heads_is_refused(tmp_path):
    folders = {}
    for scheme, heads in (("w8a8", 4), ("w4a16", 2)):
        model, state, *linears = model_of("qwen3_next", linear_num_value_heads=heads)
        folders[scheme] = write_checkpoint(tmp_path / scheme, model.config, state, scheme, *linears)
    with refused("differ .linear_num_value_heads: 4 against 2"):
        merge_checkpoints(folders, tmp_path / "merged")


def test_a_state_of_another_shape_than_the_config_says_is_named(tmp_path):
    def fewer(state: StateDict) -> None:
        for name in [name for name in state if name.endswith(".A_log")]:
            state[name] = state[name][:2]

    with refused(r"layers.0.linear_attn.A_log' has shape \[2\]"):
        merge_checkpoints(write_pair(tmp_path, of_both=fewer), tmp_path / "merged")


def test_a_rotated_residual_stream_shares_states_but_not_layers(tmp_path):
    def plain_norms(state: StateDict) -> None:
        for name, tensor in state.items():
            if name.endswith(("input_layernorm.weight", "model.norm.weight")):
                tensor.zero_()

    def rotate(state: StateDict) -> None:
        turn = orthogonal(128)
        for name, tensor in state.items():
            if re.search(r"embed_tokens|lm_head|in_proj_|\.[qkv]_proj\.", name):
                tensor.copy_(tensor @ turn)

    found = report(tmp_path, rotate, of_both=plain_norms)
    assert found.compatible and not found.layered_plans, found.message
    assert "residual streams lie in different bases" in found.residual_messages[0]

    def slower_too(state: StateDict) -> None:
        rotate(state)
        state["model.layers.0.linear_attn.A_log"] -= 0.5

    found = report(tmp_path / "too", slower_too, of_both=plain_norms)
    assert "layer 0 linear_attn.A_log" in found.message


def test_a_state_that_transformers_does_not_keep_is_refused(tmp_path):
    folder = write_pair(tmp_path)["first"]
    edits.tensors(lambda s: s.update({"model.layers.3.self_attn.A_log": torch.zeros(4)}))(folder)
    with refused("layer 3 of variant 'a' has a state .* in 'model.layers.3.self"):
        compare_and_refuse(opened({"a": folder, "b": folder}), tmp_path / "out")
