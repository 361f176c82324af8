# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A nested variant's integers: what is stored, what is computed of it, what changes, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file

from flexquant.checkpoint.folder import read_tensors
from flexquant.checkpoint.merged_checkpoint import PROVENANCE_FILE, MergedCheckpoint
from flexquant.checkpoint.merged_config import MergedConfig
from flexquant.checkpoint.nested import predict, unpack_differences
from flexquant.checkpoint.safetensors_io import total_bytes
from flexquant.checkpoint.weight_bytes import report_checkpoint
from flexquant.cli import main
from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints, split_checkpoint, verify_checkpoint
from flexquant.merge.nesting import (
    MAX_CHANGED,
    find_differences,
    fit_column,
    fit_rows,
    pack_differences,
    shrink_rows,
)
from flexquant.policy.routes import build_route_table
from flexquant.policy.rules import load_policy
from tests.checkpoints import (
    StateDict,
    base_config,
    flip_a_byte,
    make_checkpoint,
    quantise_int8,
    random_state_dict,
)
from tests.foreign import assert_equal, config_of, tensors_of, write_foreign
from tests.publishers import edits
from tests.unit.edits import in_float32, rotate_residual, smooth_norms

LINEAR = "model.layers.1.mlp.down_proj"
FUSED = [
    [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"],
    [f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up")],
]
Edit = Callable[[Path], None]


def make_w4a16(folder: Path, group: int | None, symmetric: bool, **config: int) -> Path:
    """Write W4A16 in groups of inputs (None: one a row), with zero points unless it is symmetric."""
    make_checkpoint(folder, scheme="w4a16", group_size=1, **config)
    state, _ = random_state_dict(base_config(**config))
    tensors = load_file(folder / "model.safetensors")
    for name in [name.removesuffix("_packed") for name in tensors if name.endswith("_packed")]:
        weight = state[name].float().unflatten(1, (-1, group or state[name].shape[1]))
        low, high = weight.amin(2).clamp_max(0), weight.amax(2).clamp_min(0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / 15).to(torch.bfloat16)
        zero = torch.zeros_like(low) if symmetric else torch.round(-8 - low / scale.float()).clamp(-8, 7)
        codes = torch.round(weight / scale.float()[..., None] + zero[..., None]).clamp(-8, 7)
        tensors[f"{name}_packed"] = pack_to_int32(codes.flatten(1).to(torch.int8), 4)
        tensors[f"{name}_scale"] = scale
        if not symmetric:
            tensors[f"{name}_zero_point"] = pack_to_int32(zero.to(torch.int8), 4, packed_dim=0).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    groups = config_of(folder)["quantization_config"]["config_groups"]
    groups["group_0"]["weights"] |= {
        "group_size": group,
        "strategy": "group" if group else "channel",
        "symmetric": symmetric,
    }
    edits.section(config_groups=groups)(folder)
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a smoothed W8A8 and W4A16 in groups of 32 with zero points."""
    folder = tmp_path_factory.mktemp("pair")
    smoothed = in_float32(smooth_norms())
    return {
        "w8a8": make_checkpoint(folder / "w8a8", scheme="w8a8", transform=smoothed),
        "w4a16": make_w4a16(folder / "w4a16", 32, symmetric=False),
    }


@pytest.fixture(scope="module")
def merged_once(pair: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nested") / "merged"
    merge_checkpoints(pair, folder, nested="near")
    return folder


@pytest.fixture
def merged(merged_once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(merged_once, tmp_path / "merged")


def nibbles(words: np.ndarray, axis: int) -> np.ndarray:
    """Return the eight unsigned integers of each int32 word, along an axis."""
    parts = [(words.view(np.uint32) >> np.uint32(4 * place)) & np.uint32(15) for place in range(8)]
    stacked = np.stack(parts, axis=axis + 1).astype(np.int32)
    shape = list(words.shape)
    shape[axis] *= 8
    return stacked.reshape(shape)


def predicted_by_the_page(tensors: StateDict, module: str) -> np.ndarray:
    """Return what INT4 weights predict by FORMAT.md, as it says it, int32 [outputs, inputs]."""
    values = nibbles(tensors[f"w4a16.{module}.weight_packed"].numpy(), axis=1)
    scale = tensors[f"w4a16.{module}.weight_scale"].to(torch.float32).numpy()
    outputs, groups = scale.shape
    zero = np.full((outputs, groups), 8, np.int32)
    if (stored := tensors.get(f"w4a16.{module}.weight_zero_point")) is not None:
        zero = nibbles(stored.numpy(), axis=0)[:outputs]
    row, column = (tensors[f"w8a8.{module}.weight_{part}"].numpy() for part in ("row", "column"))
    assert (row.dtype, row.shape, column.dtype) == (np.float32, (outputs, 1), np.float32)
    assert np.isfinite(row).all() and (column > 0).all() and np.isfinite(column).all()
    near = np.empty(values.shape, np.float32)
    for i in range(values.shape[1]):
        group = i * groups // values.shape[1]
        ratio = scale[:, group] * row[:, 0]
        near[:, i] = ((values[:, i] - zero[:, group]).astype(np.float32) * ratio) * column[i]
    return np.rint(near).astype(np.int32)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_what_is_stored_gives_the_integers_as_the_format_says(tmp_path, pair, group, symmetric):
    sources = {"w8a8": pair["w8a8"], "w4a16": make_w4a16(tmp_path / "w4a16", group, symmetric)}
    merge_checkpoints(sources, tmp_path / "merged", nested="near")
    split_checkpoint(tmp_path / "merged", "w8a8", tmp_path / "split")
    stored, source, split = (
        tensors_of(f) for f in (tmp_path / "merged", sources["w8a8"], tmp_path / "split")
    )
    quantised = [name.removesuffix(".weight") for name in source if source[name].dtype == torch.int8]
    changed = 0
    for module in quantised:
        predicted = predicted_by_the_page(stored, module)
        packed = stored.pop(f"w8a8.{module}.weight_difference").numpy()
        assert packed.dtype == np.uint8 and packed.shape == (len(predicted), predicted.shape[1] // 2)
        difference = np.empty(predicted.shape, np.int32)
        difference[:, 0::2], difference[:, 1::2] = packed & 15, packed >> 4
        difference -= 8
        served, wanted = split[f"{module}.weight"], source[f"{module}.weight"].numpy().astype(np.int32)
        assert np.array_equal(served.numpy(), predicted + difference) and np.abs(served.numpy()).max() <= 127
        error = wanted - served.numpy()
        assert (difference[error > 0] == 7).all() and (difference[error < 0] == -8).all()
        changed += int((error != 0).sum())
        assert f"w8a8.{module}.weight" not in stored
    of_variant = {name for name in stored if name.startswith("w8a8.")}
    factors = {f"w8a8.{module}.weight_{part}" for module in quantised for part in ("row", "column")}
    assert of_variant - factors == {f"w8a8.{name}" for name in source if f"shared.{name}" not in stored} - {
        f"w8a8.{module}.weight" for module in quantised
    }
    for modules in FUSED:
        columns = [stored[f"w8a8.{module}.weight_column"] for module in modules]
        assert columns[0].std() > 0.1 and all(torch.equal(column, columns[0]) for column in columns)
    recorded = json.loads((tmp_path / "merged" / PROVENANCE_FILE).read_text())["changed_integers"]
    assert recorded == {"w8a8": changed} and changed > 0
    of_weights = {f"{module}.weight" for module in quantised}
    assert_equal(*({k: v for k, v in t.items() if k not in of_weights} for t in (split, source)))
    expected = config_of(sources["w8a8"])
    expected.pop("_name_or_path", None)
    assert config_of(tmp_path / "split") == expected


def test_factors_of_rows_and_columns_are_found_again():
    torch.manual_seed(0)
    weight4 = torch.randint(-8, 8, (40, 64)).double()
    row, column = torch.rand(40, 1).double() + 0.5, torch.rand(64).double() * 9 + 0.1
    weight8 = row * column * weight4
    found = fit_column(lambda: [(weight8[:25], weight4[:25]), (weight8[25:], weight4[25:])], 64)
    assert torch.allclose(found.double(), column / column.max(), rtol=1e-3)
    rows = fit_rows(weight8, weight4, found.double())
    assert torch.allclose(rows, row[:, 0] * column.max(), rtol=1e-3)


def test_rows_and_columns_of_zeros_have_finite_factors():
    weight8, weight4 = (torch.randint(-8, 8, (6, 8)).double() for _ in range(2))
    weight4[1], weight4[:, 3], weight8[2], weight8[:, 5] = 0, 0, 0, 0
    column = fit_column(lambda: [(weight8, weight4)], 8)
    rows = fit_rows(weight8, weight4, column.double())
    assert column.isfinite().all() and (column > 0).all() and rows.isfinite().all() and rows[1] == 1
    nothing = torch.zeros(6, 8).double()
    assert fit_column(lambda: [(weight8, nothing)], 8).equal(torch.ones(8))


def test_a_row_that_predicts_too_much_is_shrunk_and_no_other():
    values = torch.tensor([[[-8.0, 7.0]], [[-8.0, 7.0]], [[0.0, 1.0]]])
    scale, column = torch.ones(3, 1, 1), torch.tensor([1.0, 2.0])
    row = torch.tensor([[9.0], [10.0], [torch.inf]])
    shrunk = shrink_rows(row, values, scale, column)
    assert shrunk[0] == 9 and shrunk.isfinite().all()
    assert predict(values, scale, shrunk, column).abs().amax(1)[:2].tolist() == [126, 134]


@pytest.mark.parametrize(
    ("weight", "predicted", "difference"),
    [
        (0, 7, -7),
        (0, 8, -8),
        (0, 9, -8),
        (7, 0, 7),
        (8, 0, 7),
        (-128, -125, -2),
        (127, 134, -7),
        (127, 120, 7),
    ],
)
def test_a_difference_ends_at_four_bits_and_at_127(weight, predicted, difference):
    found, changed = find_differences(
        torch.tensor([[weight, 0]], dtype=torch.int8), torch.tensor([[float(predicted), 0]])
    )
    assert found.tolist() == [[difference, 0]]
    assert changed == (predicted + difference != weight)


def test_every_difference_is_read_as_it_was_packed():
    every = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8))
    stored = pack_differences(every)
    assert stored.dtype == torch.uint8 and stored[0] == 0 and pack_differences(torch.tensor([[-7, -8]])) == 1
    assert torch.equal(unpack_differences(stored), every.to(torch.int8))


def within_reach(folder: Path, pair: dict[str, Path]) -> dict[str, Path]:
    """Return W4A16, and W8A8 of the weights that it stands for: 4 bits reach all integers."""
    stored = tensors_of(pair["w4a16"])
    eight = shutil.copytree(pair["w8a8"], folder / "w8a8")
    tensors: StateDict = {
        k: v for k, v in stored.items() if not k.endswith(("_packed", "_shape", "_zero_point"))
    }
    for name in [name.removesuffix("_packed") for name in stored if name.endswith("_packed")]:
        scale = stored[f"{name}_scale"].float()
        values = nibbles(stored[f"{name}_packed"].numpy(), axis=1) - 8
        zero = nibbles(stored[f"{name}_zero_point"].numpy(), axis=0) - 8
        of_zero = (
            torch.from_numpy(values).unflatten(1, (scale.shape[1], -1)) - torch.from_numpy(zero)[..., None]
        )
        tensors |= quantise_int8(name, (of_zero * scale[..., None]).flatten(1))
    save_file(tensors, eight / "model.safetensors", metadata={"format": "pt"})
    return pair | {"w8a8": eight}


def test_exact_keeps_every_integer_or_refuses(tmp_path, pair):
    with pytest.raises(
        FlexQuantError, match=r"\d+ of \d+ integers .* none may change with --nested-exact: take"
    ):
        merge_checkpoints(pair, tmp_path / "merged", nested="exact")
    assert not list(tmp_path.iterdir())
    sources = within_reach(tmp_path, pair)
    merge_checkpoints(sources, tmp_path / "merged", nested="exact")
    split_checkpoint(tmp_path / "merged", "w8a8", tmp_path / "split")
    assert_equal(tensors_of(tmp_path / "split"), tensors_of(sources["w8a8"]))
    assert MergedCheckpoint.open(tmp_path / "merged").provenance.changed_integers == {"w8a8": 0}


def of_llama(**options: object) -> Callable[[Path], Path]:
    return lambda folder: make_checkpoint(folder, **options)


def with_indices(folder: Path) -> Path:
    make_checkpoint(folder, scheme="w4a16")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{LINEAR}.weight_g_idx"] = torch.arange(256, dtype=torch.int32).flip(0) // 64
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def with_static_activations(folder: Path) -> Path:
    make_checkpoint(folder, scheme="w8a8")
    groups = config_of(folder)["quantization_config"]["config_groups"]
    groups["group_0"]["input_activations"] |= {"dynamic": False, "strategy": "tensor", "observer": "minmax"}
    edits.section(config_groups=groups)(folder)
    tensors = load_file(folder / "model.safetensors")
    modules = [name.removesuffix("_scale") for name in tensors if name.endswith(".weight_scale")]
    tensors |= {f"{m.removesuffix('.weight')}.input_scale": torch.ones(1) for m in modules}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


W8A8, W4A16 = of_llama(scheme="w8a8"), of_llama(scheme="w4a16")
O_PROJ = ["re:.*o_proj$"]
TWICE = "which stores the weights of both"


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        ({"w8a8": W8A8}, r"nothing of w8a8 can be nested: .* add what is missing, or merge without --nested"),
        ({"fp8": of_llama(scheme="fp8"), "w4a16": W4A16}, "nothing of fp8, w4a16 can be nested"),
        ({"w8a8": with_static_activations, "w4a16": W4A16}, "nothing of w8a8, w4a16 can be nested"),
        (
            {"w8a8": W8A8, "w4a16": W4A16, "fine": of_llama(scheme="w4a16", group_size=32)},
            f"w4a16 and fine have INT4 weights .* which.* {TWICE}",
        ),
        (
            {"w8a8": of_llama(scheme="w8a8", ignore=O_PROJ), "w4a16": W4A16},
            f"'w8a8' cannot be nested in 'w4a16': '.*0.self_attn.o_proj' .* but is 16 bit in the one, and in the "
            f"other weights 4-bit int by group 64, .*{TWICE}",
        ),
        (
            {"w8a8": W8A8, "w4a16": of_llama(scheme="w4a16", ignore=O_PROJ)},
            f"'.*0.self_attn.o_proj' .* as int-quantized in the one, and in the other 16 bit; .*{TWICE}",
        ),
        (
            {name: of_llama(architecture="qwen3_moe", scheme=name) for name in ("w8a8", "w4a16")},
            f"'model.layers.0.mlp.experts.0.down_proj' is one of a mixture's experts; .*{TWICE}",
        ),
        (
            {
                "w8a8": of_llama(scheme="w8a8", intermediate_size=255),
                "w4a16": lambda folder: make_w4a16(folder, None, True, intermediate_size=255),
            },
            f"'model.layers.0.mlp.down_proj' has an odd number of inputs; .*{TWICE}",
        ),
        ({"w8a8": W8A8, "w4a16": with_indices}, "inputs in another order"),
        (
            {"w4a16": W4A16, "w8a8": of_llama(scheme="w8a8", transform=in_float32(rotate_residual))},
            rf"\d+ of \d+ integers .* at most {100 * MAX_CHANGED:.0f} % may change: quantise both .*{TWICE}",
        ),
    ],
    ids=[
        "no INT4",
        "FP8",
        "static activations",
        "two INT4 variants",
        "16 bit in W8A8",
        "16 bit in W4A16",
        "experts",
        "odd inputs",
        "another order",
        "rotated",
    ],
)
def test_what_cannot_be_nested_is_refused_and_the_output_stays(tmp_path, made, problem):
    sources = {name: make(tmp_path / name) for name, make in made.items()}
    output = tmp_path / "merged"
    output.mkdir()
    (output / "config.json").write_text('{"of": "an earlier merge"}')
    before = sorted(tmp_path.iterdir())
    with pytest.raises(FlexQuantError, match=problem):
        merge_checkpoints(sources, output, nested="near", overwrite=True)
    assert sorted(tmp_path.iterdir()) == before
    assert [(p.name, p.read_text()) for p in output.iterdir()] == [
        ("config.json", '{"of": "an earlier merge"}')
    ]


def test_another_format_of_int4_nests_the_same(tmp_path, pair, merged):
    sources = pair | {"w4a16": write_foreign(pair["w4a16"], tmp_path / "awq", "awq")}
    merge_checkpoints(sources, tmp_path / "again", nested="near")
    assert_equal(tensors_of(tmp_path / "again"), tensors_of(merged))


@pytest.mark.parametrize("part", ["w8a8 weight_difference", "w4a16 weight_packed", "w4a16 weight_scale"])
def test_a_flipped_bit_of_what_a_weight_is_computed_from_is_found(pair, merged, tmp_path, part):
    variant, name = part.split()
    flip_a_byte(merged, f"{variant}.{LINEAR}.{name}")
    for read in (
        lambda: verify_checkpoint(merged),
        lambda: split_checkpoint(merged, "w8a8", tmp_path / "split"),
    ):
        with pytest.raises(FlexQuantError, match=rf"{variant}\.{LINEAR}\.{name}"):
            read()
    assert not (tmp_path / "split").exists()
    with pytest.raises(FlexQuantError, match=rf"1 of .*\({LINEAR}\.weight in "):
        verify_checkpoint(merged, {"w8a8": pair["w8a8"]})


def test_verify_compares_with_the_sources(pair, merged, tmp_path):
    found = verify_checkpoint(merged, pair)
    assert found["tensors_compared_with"] == {n: len(read_tensors(folder)) for n, folder in pair.items()}
    assert found["nested"] == ["w8a8"]
    other = make_checkpoint(tmp_path / "other", scheme="w8a8", transform=in_float32(smooth_norms(low=0.9)))
    with pytest.raises(FlexQuantError, match="tensors in .* differ from"):
        verify_checkpoint(merged, {"w8a8": other})


@pytest.mark.parametrize("part", ["weight_row", "weight_column", "w4a16 weight_packed", "w4a16 weight_scale"])
def test_a_part_that_is_missing_or_of_another_shape_is_one_sentence(merged, tmp_path, part):
    variant, _, name = f"w8a8 {part}".rpartition(" ")
    key = f"{variant.split()[-1]}.{LINEAR}.{name}"
    checkpoint = MergedCheckpoint.open(merged)
    shard = checkpoint.tensors[key].file
    tensors = load_file(shard)
    for damaged in (None, tensors[key].flatten()[:-1].clone()):
        changed = {k: v for k, v in tensors.items() if k != key} | ({} if damaged is None else {key: damaged})
        save_file(changed, shard, metadata={"format": "pt"})
        (merged / "model.safetensors.index.json").unlink(missing_ok=True)
        with pytest.raises(FlexQuantError, match=r"weight_(difference|packed|shape)'.*(fetch|quantise)"):
            MergedCheckpoint.open(merged).variant_tensors("w8a8")


def test_weights_beyond_int8_are_refused(merged, tmp_path):
    checkpoint = MergedCheckpoint.open(merged)
    key = f"w8a8.{LINEAR}.weight_row"
    tensors = load_file(checkpoint.tensors[key].file)
    tensors[key] *= 2
    save_file(tensors, checkpoint.tensors[key].file, metadata={"format": "pt"})
    (merged / PROVENANCE_FILE).unlink()
    with pytest.raises(FlexQuantError, match=f"{LINEAR}.weight_difference.* beyond 127; fetch or merge"):
        split_checkpoint(merged, "w8a8", tmp_path / "split")
    assert not (tmp_path / "split").exists()


def test_the_config_names_the_source_in_nested_checkpoints_alone(pair, merged, tmp_path):
    section = config_of(merged)["quantization_config"]
    assert section["schema_version"] == 2
    assert {name: v.get("nested_in") for name, v in section["variants"].items()} == {
        "w8a8": "w4a16",
        "w4a16": None,
    }
    assert "nested_in" not in section["variants"]["w4a16"]
    assert MergedConfig.from_json(section).to_json() == section
    merge_checkpoints(pair, tmp_path / "plain")
    plain = config_of(tmp_path / "plain")["quantization_config"]
    assert plain["schema_version"] == 1 and not any("nested_in" in v for v in plain["variants"].values())
    assert "changed_integers" not in json.loads((tmp_path / "plain" / PROVENANCE_FILE).read_text())


@pytest.mark.parametrize("source", ["w8a8", "fp8", "", "w4a16"])
def test_a_variant_nested_in_none_that_could_be_is_refused(merged, source):
    section = config_of(merged)["quantization_config"]
    section["variants"]["w8a8"]["nested_in"] = source
    if source == "w4a16":
        section["variants"]["w4a16"]["nested_in"] = "w8a8"
    with pytest.raises(
        FlexQuantError, match="'w8a8' has nested_in .* expected another variant that is not nested"
    ):
        MergedConfig.from_json(section)


def test_bytes_are_those_that_are_stored(merged):
    checkpoint = MergedCheckpoint.open(merged)
    report = report_checkpoint(checkpoint.merged, 2, checkpoint.tensors)
    assert report.total_bytes == total_bytes(checkpoint.tensors)
    eight, four = report.variants["w8a8"], report.variants["w4a16"]
    assert eight.parameters == four.parameters
    of_linears = [ref for key, ref in checkpoint.tensors.items() if "_proj.weight" in key]
    integers = sum(2 * ref.nbytes for ref in of_linears if ref.name.endswith("_difference"))
    assert eight.nested.bits_with_source == pytest.approx(8 * sum(r.nbytes for r in of_linears) / integers)
    routes = {p: build_route_table(load_policy(p), ["w8a8", "w4a16"], 2, 64) for p in ("w8a8", "phase")}
    loaded = {p: table.stored_bytes(checkpoint, table.plans) for p, table in routes.items()}
    packed = {key for key in checkpoint.tensors if key.startswith("w4a16.") and "_proj.weight" in key}
    assert loaded["phase"]["w8a8"] == {"0-1": eight.own_bytes}
    assert loaded["w8a8"]["w8a8"] == {
        "0-1": eight.own_bytes + sum(checkpoint.tensors[k].nbytes for k in packed)
    }


def test_command_line(pair, tmp_path, capsys):
    output, named = str(tmp_path / "merged"), [f"{name}={folder}" for name, folder in pair.items()]
    assert main(["merge", "--nested-exact", *named, "--output", output]) == 1
    assert "none may change" in capsys.readouterr().err
    assert main(["merge", "--nested", *named, "--output", output]) == 0
    said = r"w8a8: 4\.\d+ bits a weight in its linears, [89]\.\d+ with w4a16's; [\d.]+ % of its integers"
    for command in (["inspect", output], None):
        text = capsys.readouterr().out
        assert "w8a8 (nested in w4a16)" in text
        assert re.search(said, text)
        if command:
            assert main(command) == 0
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "| `w8a8` (nested in w4a16) |" in card and "nested weights as they are served" in card
    assert main(["verify", output, "--against", *named]) == 0
    assert "tensors equal to w8a8, nested weights as near as 4 bits reach" in capsys.readouterr().out
