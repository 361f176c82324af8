# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""K and V are compared to the last row at every size; what changes a whole projection is found in a sample.

The sizes go past those of a sample: at 128 every row is compared, at 576 one in four, at 1024 one in eight,
and from 2048 on one in sixteen, the fewest there are.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flexquant.errors import FlexQuantError
from flexquant.merge.formats import Source, open_source
from flexquant.merge.kv.agreement import BLOCK_ROWS, row_numbers, sample_rows
from flexquant.merge.kv.compatibility import KVReport, check_kv_compatibility
from tests.checkpoints import StateDict, base_config, make_checkpoint, random_state_dict
from tests.unit.edits import Edit, in_float32, orthogonal, rotate_residual, scale_up_to_down
from tests.unit.full_merge import compare_and_refuse

SIZES = {128: 1, 576: 4, 1024: 8, 2048: 16, 4096: 16}
"""Hidden size -> one block in this many is compared."""
LARGE = 4096
HEAD_DIM, KV_HEADS, HEADS = 32, 2, 4
LAYERS = 2


def write(
    folder: Path, scheme: str, hidden: int, edit: Edit | None = None, seed: int = 0, kv_heads: int = KV_HEADS
) -> Source:
    """Write a model that is narrow inside, so that a wide residual stream stays quick."""
    sizes = {
        "hidden_size": hidden,
        "num_attention_heads": max(HEADS, kv_heads),
        "num_key_value_heads": kv_heads,
    }

    def change(state: StateDict) -> None:
        if seed:  # only the layers are from another model
            own, _ = random_state_dict(base_config(**sizes))
            state |= {name: own[name].float() for name in state if ".layers." not in name}
        if edit is not None:
            torch.manual_seed(7)
            edit(state)

    make_checkpoint(folder, scheme=scheme, seed=seed, group_size=32, transform=in_float32(change), **sizes)
    return open_source(folder.name, folder)


def compare(
    tmp_path: Path, hidden: int, edit: Edit | None = None, seed: int = 0, kv_heads: int = KV_HEADS
) -> KVReport:
    """Compare an untouched variant (the reference) with an edited one, or one of another seed."""
    reference = write(tmp_path / "w8a8", "w8a8", hidden, kv_heads=kv_heads)
    other = write(tmp_path / "w4a16", "w4a16", hidden, edit, seed, kv_heads)
    return compare_and_refuse([reference, other], tmp_path / "out")


def rotate_heads(projection: str) -> Edit:
    def edit(state: StateDict) -> None:
        for layer in range(LAYERS):
            name = f"model.layers.{layer}.self_attn.{projection}.weight"
            heads = state[name].unflatten(0, (-1, HEAD_DIM))
            state[name] = (orthogonal(HEAD_DIM) @ heads).flatten(0, 1)

    return edit


def smooth_v_to_o(state: StateDict) -> None:
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.self_attn."
        scale = torch.empty(KV_HEADS, HEAD_DIM).uniform_(0.8, 1.25)
        state[prefix + "v_proj.weight"] *= scale.reshape(-1, 1)
        state[prefix + "o_proj.weight"] /= scale.repeat_interleave(HEADS // KV_HEADS, 0).reshape(-1)


def rotate_input(projection: str) -> Edit:
    def edit(state: StateDict) -> None:
        name = f"model.layers.1.{projection}.weight"
        state[name] = state[name] @ orthogonal(state[name].shape[1])

    return edit


def replace_weights(*projections: str) -> Edit:
    def edit(state: StateDict) -> None:
        for projection in projections:
            name = f"model.layers.1.{projection}.weight"
            state[name] = torch.randn_like(state[name])

    return edit


def double(projection: str, rows: list[int], layers: tuple[int, ...] = (1,)) -> Edit:
    def edit(state: StateDict) -> None:
        for layer in layers:
            state[f"model.layers.{layer}.{projection}.weight"][rows] *= 2

    return edit


sizes = pytest.mark.parametrize("hidden", SIZES)


@sizes
def test_roundings_of_one_model_mix(tmp_path, hidden):
    found = compare(tmp_path, hidden)
    assert found.layered_plans, found
    assert all(worst["share_of_bound"] < 0.75 for worst in found.worst.values()), found.worst


@sizes
def test_a_fold_between_up_and_down_mixes(tmp_path, hidden):
    assert compare(tmp_path, hidden, scale_up_to_down).layered_plans


@sizes
@pytest.mark.parametrize(
    ("edit", "where"),
    [
        (rotate_heads("k_proj"), "layer 0 self_attn.k_proj"),
        (rotate_heads("v_proj"), "layer 0 self_attn.v_proj"),
        (smooth_v_to_o, "layer 0 self_attn.v_proj"),
        (replace_weights("self_attn.k_proj"), "layer 1 self_attn.k_proj"),
    ],
    ids=["k rotated", "v rotated", "v to o smoothed", "other k"],
)
def test_another_cache_is_refused(tmp_path, hidden, edit, where):
    found = compare(tmp_path, hidden, edit)
    assert not found.compatible and where in found.message


@sizes
def test_another_seed_is_refused(tmp_path, hidden):
    assert "layer 0 self_attn.k_proj" in compare(tmp_path, hidden, seed=1).message


@sizes
@pytest.mark.parametrize("writer", ["self_attn.o_proj", "mlp.down_proj"])
@pytest.mark.parametrize("fault", [rotate_input, replace_weights], ids=["rotated", "replaced"])
def test_an_output_of_another_model_is_refused(tmp_path, hidden, writer, fault):
    assert f"layer 1 {writer} differs" in compare(tmp_path, hidden, fault(writer)).message


def many_heads(tmp_path: Path, edit: Edit) -> KVReport:
    """Compare K and V of 4096 rows: if they were sampled, one row in sixteen would be compared."""
    return compare(tmp_path, 128, edit, kv_heads=128)


@pytest.mark.parametrize("projection", ["k_proj", "v_proj"])
@pytest.mark.parametrize("row", [0, 15, 16, 1000, 2047, 2048, 4095])
def test_any_row_of_k_or_v_is_compared(tmp_path, projection, row):
    found = many_heads(tmp_path, double(f"self_attn.{projection}", [row]))
    assert f"layer 1 self_attn.{projection}" in found.message and f"gain error of row {row} " in found.message


@pytest.mark.parametrize("projection", ["k_proj", "v_proj"])
@pytest.mark.parametrize("head", [0, 1, 64, 126, 127])
def test_any_head_of_k_or_v_is_compared(tmp_path, projection, head):
    def rotate_head(state: StateDict) -> None:
        weight = state[f"model.layers.1.self_attn.{projection}.weight"]
        rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        weight[rows] = orthogonal(HEAD_DIM) @ weight[rows]

    assert f"layer 1 self_attn.{projection}" in many_heads(tmp_path, rotate_head).message


def test_a_head_of_noise_is_refused(tmp_path):
    def add_noise(state: StateDict) -> None:
        rows = state["model.layers.1.self_attn.v_proj.weight"][64 * HEAD_DIM : 65 * HEAD_DIM]
        rows += 0.6 * rows.std() * torch.randn_like(rows)

    message = many_heads(tmp_path, add_noise).message
    assert "layer 1 self_attn.v_proj" in message and "relative error of head 64" in message


def rows_compared(layer: int) -> set[int]:
    """Return the rows of o_proj, the fourth matrix of the layer, that are compared."""
    return set(row_numbers(sample_rows(LARGE, layer + 3)).tolist())


def test_rows_outside_of_the_sample_are_not_seen_in_one_layer(tmp_path):
    outside = sorted(set(range(LARGE)) - rows_compared(layer=1))[:20]
    assert compare(tmp_path, LARGE, double("self_attn.o_proj", outside)).layered_plans


def test_a_row_inside_of_the_sample_is_named_by_its_number(tmp_path):
    row = max(rows_compared(layer=1))
    message = compare(tmp_path, LARGE, double("self_attn.o_proj", [row])).residual_messages[0]
    assert "layer 1 self_attn.o_proj" in message and f"(gain error of row {row} " in message


def test_neighbouring_layers_compare_other_rows(tmp_path):
    outside_of_one = sorted(rows_compared(layer=0) - rows_compared(layer=1))[:1]
    edit = double("self_attn.o_proj", outside_of_one, layers=(0, 1))
    assert "layer 0 self_attn.o_proj" in compare(tmp_path, LARGE, edit).residual_messages[0]


@pytest.mark.parametrize("count", [1, 512, 1023, 1024, 1040, 2048, 4100, 8192, 28672])
def test_samples_are_as_large_as_said_and_together_all(count):
    every = max(1, min(16, count // 128))
    samples = [row_numbers(sample_rows(count, turn)) for turn in range(every)]
    assert sorted(torch.cat(samples).tolist()) == list(range(count))
    for sample in samples:
        assert len(sample) >= min(count, max(128, count // 16) - BLOCK_ROWS)
        edges = torch.cat([torch.tensor([-1]), sample, torch.tensor([count])])
        assert int(edges.diff().max()) - 1 <= BLOCK_ROWS * (every - 1)


def test_a_rotation_is_found_in_a_sample_of_the_tokens(tmp_path):
    """With 2048 tokens of 128 numbers, the comparison looks at one block in four."""
    folders = [
        make_checkpoint(tmp_path / scheme, scheme=scheme, vocab_size=2048, transform=transform)
        for scheme, transform in (("w8a8", None), ("w4a16", in_float32(rotate_residual)))
    ]
    found = check_kv_compatibility([open_source(folder.name, folder) for folder in folders])
    assert found.compatible and "different bases" in found.residual_messages[0]
    assert found.worst["k_proj"]["share_of_bound"] < 0.75


def test_infinite_scales_are_found_outside_of_the_sample_too(tmp_path):
    row = min(set(range(LARGE)) - rows_compared(layer=1))

    def edit(state: StateDict) -> None:
        state["model.layers.1.self_attn.o_proj.weight"][row] = torch.inf

    with pytest.raises(FlexQuantError, match="layers.1.self_attn.o_proj' of variant 'w4a16' holds NaN"):
        compare(tmp_path, LARGE, edit)


def test_pytorchs_default_dtype_changes_nothing(tmp_path):
    """The default dtype belongs to the process; vLLM's engine may leave it at 16 bit."""
    sources = [write(tmp_path / scheme, scheme, 128) for scheme in ("w8a8", "w4a16")]
    expected = check_kv_compatibility(sources).to_json()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = check_kv_compatibility(sources).to_json()
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == expected
