# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""K and V are compared to the last row at every size; what changes a whole projection is found in a sample.

At a hidden size of 128 every row is compared (test_kv_compat), at 576 one in four, at 1024 one in eight, and
from 2048 on one in sixteen, the fewest there are.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from flexquant.merge.kv.agreement import BLOCK_ROWS, row_numbers, sample_rows
from flexquant.merge.kv.compatibility import KVReport, check_kv_compatibility
from tests.checkpoints import StateDict, base_config, make_checkpoint, make_pair, random_state_dict
from tests.refusals import refused
from tests.unit import edits as weights
from tests.unit.edits import Edit, edit_tensor, in_float32, orthogonal, rotate_residual
from tests.unit.full_merge import compare_and_refuse, opened

SIZES = {576: 4, 1024: 8, 2048: 16, 4096: 16}
"""Hidden size -> one block in this many is compared."""
LARGE = 4096
HEAD_DIM, KV_HEADS, HEADS = 32, 2, 4
Compare = Callable[..., KVReport]


def write(
    folder: Path, scheme: str, hidden: int, edit: Edit | None = None, seed=0, kv_heads=KV_HEADS
) -> Path:
    """Write a model that is narrow inside, so that a wide residual stream stays quick."""
    heads = {"num_attention_heads": max(HEADS, kv_heads), "num_key_value_heads": kv_heads}
    sizes = {"hidden_size": hidden, **heads}

    def change(state: StateDict) -> None:
        if seed:  # only the layers are from another model
            own, _ = random_state_dict(base_config(**sizes))
            state |= {name: own[name].float() for name in state if ".layers." not in name}
        if edit is not None:
            torch.manual_seed(7)
            edit(state)

    how = {"seed": seed, "group_size": 32, "transform": in_float32(change), **sizes}
    return make_checkpoint(folder, scheme=scheme, **how)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    """Return a function that writes the untouched variant of a size once."""
    folder = tmp_path_factory.mktemp("references")
    return cache(lambda hidden, heads: write(folder / f"{hidden} {heads}", "w8a8", hidden, kv_heads=heads))


@pytest.fixture
def compare(reference: Callable[[int, int], Path], tmp_path: Path) -> Compare:
    """Return a function that compares the untouched variant with an edited one, or one of another seed."""

    def run(hidden: int, edit: Edit | None = None, seed: int = 0, kv_heads: int = KV_HEADS) -> KVReport:
        other = write(tmp_path / "w4a16", "w4a16", hidden, edit, seed, kv_heads)
        sources = opened({"w8a8": reference(hidden, kv_heads), "w4a16": other})
        return compare_and_refuse(sources, tmp_path / "out")

    return run


def rotate_heads(projection: str) -> Edit:
    return edit_tensor(
        rf"{projection}\.weight",
        lambda w: (orthogonal(HEAD_DIM) @ w.unflatten(0, (-1, HEAD_DIM))).flatten(0, 1),
    )


def rotate_input(projection: str) -> Edit:
    return edit_tensor(rf"layers\.1\.{projection}\.weight", lambda w: w @ orthogonal(w.shape[1]))


def replace_weights(projection: str) -> Edit:
    return edit_tensor(rf"layers\.1\.{projection}\.weight", torch.randn_like)


def double(projection: str, rows: list[int], layers: str = "1") -> Edit:
    def doubled(weight: torch.Tensor) -> torch.Tensor:
        weight[rows] *= 2
        return weight

    return edit_tensor(rf"layers\.[{layers}]\.{projection}\.weight", doubled)


sizes = pytest.mark.parametrize("hidden", SIZES)


@sizes
def test_roundings_of_one_model_mix(compare, hidden):
    found = compare(hidden)
    assert found.layered_plans, found
    assert all(worst["share_of_bound"] < 0.75 for worst in found.worst.values()), found.worst


@sizes
def test_a_fold_between_up_and_down_mixes(compare, hidden):
    assert compare(hidden, weights.scale_up_to_down).layered_plans


@sizes
@pytest.mark.parametrize(
    ("edit", "where"),
    [
        (rotate_heads("k_proj"), "layer 0 self_attn.k_proj"),
        (rotate_heads("v_proj"), "layer 0 self_attn.v_proj"),
        (weights.smooth_v_to_o(0.8, 1.25), "layer 0 self_attn.v_proj"),
        (replace_weights("self_attn.k_proj"), "layer 1 self_attn.k_proj"),
        (rotate_input("self_attn.o_proj"), "layer 1 self_attn.o_proj differs"),
        (replace_weights("self_attn.o_proj"), "layer 1 self_attn.o_proj differs"),
        (rotate_input("mlp.down_proj"), "layer 1 mlp.down_proj differs"),
        (replace_weights("mlp.down_proj"), "layer 1 mlp.down_proj differs"),
        (None, "layer 0 self_attn.k_proj"),
    ],
    ids=["k turned", "v turned", "v to o", "other k", "o turned", "other o"]
    + ["down turned", "other down", "seed"],
)
def test_another_model_is_refused(compare, hidden, edit, where):
    found = compare(hidden, edit, seed=edit is None)
    assert not found.compatible and where in found.message


@pytest.fixture
def many_heads(compare: Compare) -> Compare:
    """Compare K and V of 4096 rows: if they were sampled, one row in sixteen would be compared."""
    return lambda edit: compare(128, edit, kv_heads=128)


@pytest.mark.parametrize("projection", ["k_proj", "v_proj"])
@pytest.mark.parametrize("row", [0, 15, 16, 1000, 2047, 2048, 4095])
def test_any_row_of_k_or_v_is_compared(many_heads, projection, row):
    found = many_heads(double(f"self_attn.{projection}", [row]))
    assert f"layer 1 self_attn.{projection}" in found.message and f"gain error of row {row} " in found.message


@pytest.mark.parametrize("projection", ["k_proj", "v_proj"])
@pytest.mark.parametrize("head", [0, 64, 127])
def test_any_head_of_k_or_v_is_compared(many_heads, projection, head):
    def rotate_head(state: StateDict) -> None:
        weight = state[f"model.layers.1.self_attn.{projection}.weight"]
        rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        weight[rows] = orthogonal(HEAD_DIM) @ weight[rows]

    assert f"layer 1 self_attn.{projection}" in many_heads(rotate_head).message


def test_a_head_of_noise_is_refused(many_heads):
    def add_noise(state: StateDict) -> None:
        rows = state["model.layers.1.self_attn.v_proj.weight"][64 * HEAD_DIM : 65 * HEAD_DIM]
        rows += 0.6 * rows.std() * torch.randn_like(rows)

    message = many_heads(add_noise).message
    assert "layer 1 self_attn.v_proj" in message and "relative error of head 64" in message


def rows_compared(layer: int) -> set[int]:
    """Return the rows of o_proj, the fourth matrix of the layer, that are compared."""
    return set(row_numbers(sample_rows(LARGE, layer + 3)).tolist())


def test_rows_outside_of_the_sample_are_not_seen_in_one_layer(compare):
    outside = sorted(set(range(LARGE)) - rows_compared(layer=1))[:20]
    assert compare(LARGE, double("self_attn.o_proj", outside)).layered_plans


def test_a_row_inside_of_the_sample_is_named_by_its_number(compare):
    row = max(rows_compared(layer=1))
    message = compare(LARGE, double("self_attn.o_proj", [row])).residual_messages[0]
    assert "layer 1 self_attn.o_proj" in message and f"(gain error of row {row} " in message


def test_neighbouring_layers_compare_other_rows(compare):
    outside_of_one = sorted(rows_compared(layer=0) - rows_compared(layer=1))[:1]
    edit = double("self_attn.o_proj", outside_of_one, layers="01")
    assert "layer 0 self_attn.o_proj" in compare(LARGE, edit).residual_messages[0]


@pytest.mark.parametrize("count", [1, 512, 1023, 1024, 1040, 2048, 4100, 8192, 28672])
def test_samples_are_as_large_as_said_and_together_all(count):
    every = max(1, min(16, count // 128))
    samples = [row_numbers(sample_rows(count, turn)) for turn in range(99, 99 + every)]
    assert sorted(torch.cat(samples).tolist()) == list(range(count))
    for sample in samples:
        assert len(sample) >= min(count, max(128, count // 16) - BLOCK_ROWS)
        edges = torch.cat([torch.tensor([-1]), sample, torch.tensor([count])])
        assert int(edges.diff().max()) - 1 <= BLOCK_ROWS * (every - 1)


def test_a_rotation_is_found_in_a_sample_of_the_tokens(tmp_path):
    """With 2048 tokens of 128 numbers, the comparison looks at one block in four."""
    folders = make_pair(tmp_path, change=in_float32(rotate_residual), vocab_size=2048)
    found = check_kv_compatibility(opened(folders))
    assert found.compatible and "different bases" in found.residual_messages[0]
    assert found.worst["k_proj"]["share_of_bound"] < 0.75


def test_infinite_scales_are_found_outside_of_the_sample_too(compare):
    row = min(set(range(LARGE)) - rows_compared(layer=1))

    def edit(state: StateDict) -> None:
        state["model.layers.1.self_attn.o_proj.weight"][row] = torch.inf

    with refused("layers.1.self_attn.o_proj' of variant 'w4a16' holds NaN"):
        compare(LARGE, edit)


def test_pytorchs_default_dtype_changes_nothing(tmp_path):
    """The default dtype belongs to the process; vLLM's engine may leave it at 16 bit."""
    sources = opened(make_pair(tmp_path, group_size=32))
    expected = check_kv_compatibility(sources).to_json()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = check_kv_compatibility(sources).to_json()
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == expected
