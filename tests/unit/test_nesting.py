# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A nested variant's integers: what is stored, what is computed of it, and what changes."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import save_file

from flexquant.checkpoint.merged_checkpoint import PROVENANCE_FILE, MergedCheckpoint
from flexquant.checkpoint.merged_config import MergedConfig
from flexquant.checkpoint.nested import Int4Weight, NestedWeight, nested_weights
from flexquant.checkpoint.safetensors_io import TensorRef, load_tensor, read_header, total_bytes
from flexquant.checkpoint.weight_bytes import report_checkpoint
from flexquant.cli import main
from flexquant.merge import merge_checkpoints, nesting, split_checkpoint, verify_checkpoint
from flexquant.merge.nested_fit import WIDTHS
from flexquant.merge.nesting import Nested, NestedLayer, Pair, is_nearest
from flexquant.policy.routes import build_route_table
from flexquant.policy.rules import load_policy
from tests.checkpoints import StateDict, quantise_int8
from tests.foreign import assert_equal, config_of, tensors_of, write_foreign
from tests.refusals import refused
from tests.states import make_variants
from tests.unit.nested import exceptions_by_the_page, make_w4a16

FUSED = [
    [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"],
    [f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up")],
]


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


def with_lowest_integers(folder: Path, made: Path) -> Path:
    """Copy W8A8 with some of its integers -128."""
    eight = shutil.copytree(made, folder / "w8a8")
    tensors = tensors_of(eight)
    for tensor in tensors.values():
        if tensor.dtype == torch.int8:
            tensor[tensor < -110] = -128
    save_file(tensors, eight / "model.safetensors", metadata={"format": "pt"})
    return eight


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_what_is_stored_gives_the_integers_as_the_format_says(tmp_path, nested_pair, group, symmetric):
    sources = {
        "w8a8": with_lowest_integers(tmp_path, nested_pair["w8a8"]),
        "w4a16": make_w4a16(tmp_path / "w4a16", group, symmetric),
    }
    merge_checkpoints(sources, tmp_path / "merged", nested="near")
    split_checkpoint(tmp_path / "merged", "w8a8", tmp_path / "split")
    stored, source, split = map(tensors_of, (tmp_path / "merged", sources["w8a8"], tmp_path / "split"))
    quantised = [name.removesuffix(".weight") for name in source if source[name].dtype == torch.int8]
    changed, squared, weights, lowest, widths = 0, 0.0, 0, 0, set[float]()
    for module in quantised:
        predicted = predicted_by_the_page(stored, module)
        packed = stored.pop(f"w8a8.{module}.weight_difference").numpy()
        assert packed.dtype == np.uint8 and packed.shape == (len(predicted), predicted.shape[1] // 2)
        difference = np.empty(predicted.shape, np.int32)
        difference[:, 0::2], difference[:, 1::2] = packed & 15, packed >> 4
        difference -= 8
        served, given = split[f"{module}.weight"], source[f"{module}.weight"].numpy().astype(np.int32)
        assert np.abs(predicted).max() <= 134
        scale, wide = (t[f"{module}.weight_scale"].float().numpy() for t in (source, split))
        narrowing = scale / wide
        wanted = np.rint(given.astype(np.float32) * narrowing).astype(np.int32)
        widths |= {round(float(x), 1) for x in (wide / scale).flatten()}
        found = predicted + difference
        error = wanted - found
        assert (difference[error > 0] == 7).all() and (difference[error < 0] == -8).all()
        exceptions = f"w8a8.{module}.weight_exception"
        inputs, values = (stored.pop(f"{exceptions}{end}").numpy() for end in ("_input", ""))
        assert (inputs.dtype, values.dtype) == (np.uint16, np.int8)
        assert np.array_equal(inputs, [exceptions_by_the_page(row) for row in error])
        assert np.array_equal(values, np.take_along_axis(wanted, inputs.astype(int), 1))
        np.put_along_axis(found, inputs.astype(int), values.astype(np.int32), 1)
        assert np.array_equal(served.numpy(), found)
        far = found.astype(np.float64) / narrowing - given
        changed += int((far != 0).sum())
        squared += float((far**2).sum())
        weights += wanted.size
        lowest += int((found == -128).sum())
        assert f"w8a8.{module}.weight" not in stored
    of_variant = {name for name in stored if name.startswith("w8a8.")}
    factors = {f"w8a8.{module}.weight_{part}" for module in quantised for part in ("row", "column")}
    assert of_variant - factors == {f"w8a8.{name}" for name in source if f"shared.{name}" not in stored} - {
        f"w8a8.{module}.weight" for module in quantised
    }
    for modules in FUSED:
        columns = [stored[f"w8a8.{module}.weight_column"] for module in modules]
        assert columns[0].std() > 0.1 and all(torch.equal(column, columns[0]) for column in columns)
    recorded = json.loads((tmp_path / "merged" / PROVENANCE_FILE).read_text())
    assert recorded["changed_integers"] == {"w8a8": changed} and changed > 0 and lowest > 0
    assert recorded["added_noise"] == {"w8a8": float(f"{12 * squared / weights:.4g}")}
    verify_checkpoint(tmp_path / "merged", sources)
    assert 1.0 in widths and widths <= set(WIDTHS)
    of_weights = {f"{module}.{part}" for module in quantised for part in ("weight", "weight_scale")}
    assert_equal(*({k: v for k, v in t.items() if k not in of_weights} for t in (split, source)))
    expected = config_of(sources["w8a8"])
    expected.pop("_name_or_path", None)
    assert config_of(tmp_path / "split") == expected


def test_linears_that_vllm_fuses_have_one_column_whatever_their_names(tmp_path):
    make_variants(tmp_path, "lfm2")
    sources = {name: tmp_path / name for name in ("w8a8", "w4a16")}
    merge_checkpoints(sources, tmp_path / "merged", nested="near")
    stored = tensors_of(tmp_path / "merged")
    for names in (("w1", "w3"), ("q_proj", "k_proj", "v_proj")):
        layers = {key.rpartition(f".{names[0]}.")[0] for key in stored if f".{names[0]}.weight_column" in key}
        assert layers
        for layer in layers:
            first, *others = (stored[f"{layer}.{name}.weight_column"] for name in names)
            assert all(torch.equal(first, other) for other in others)


def layer_that_misses(folder: Path, counts: list[int], nested: Nested) -> NestedLayer:
    """Return a layer of 200 inputs, in which 4 bits miss so many weights of each of three rows by two.

    Such a weight and two beside it are off by -10, 7 and 3, which cancels in rows and columns: all weights
    are predicted to be 41, of which no wider step is a part.
    """
    weight8 = torch.full((3 * len(counts), 200), 41, dtype=torch.int8)
    for number, count in enumerate(counts):
        for row in range(3):
            off = torch.tensor([-10, 7, 3], dtype=torch.int8).roll(row).repeat(count)
            weight8[3 * number + row, : 3 * count] += off
    stored = {
        "x.weight": weight8,
        "x.weight_packed": pack_to_int32(torch.full_like(weight8, 5), 4).contiguous(),
        "x.weight_scale": torch.ones(len(weight8), 1),
        "x.scale8": torch.ones(len(weight8), 1),
        "x.weight_shape": torch.tensor(weight8.shape),
    }
    save_file(stored, folder / "x.safetensors")
    tensors = read_header(folder / "x.safetensors")
    int4 = Int4Weight.of(tensors, "x")
    assert int4 is not None
    return NestedLayer({"x": Pair(tensors["x.weight"], tensors["x.scale8"], int4)}, "w8a8", nested)


def as_stored(layer: NestedLayer, folder: Path) -> tuple[NestedWeight, TensorRef]:
    """Return a layer's weight and its scales as they are stored."""
    stored = {f"x.{ref.name.rpartition('.')[2]}": ref for ref in layer.stored().values()}
    return nested_weights(stored, read_header(folder / "x.safetensors"))["x.weight"], stored["x.weight_scale"]


def test_the_noise_that_misses_add_has_a_bound(tmp_path, monkeypatch):
    count = 7  # of which two in a row are exceptions; wider steps would add more
    missed = layer_that_misses(tmp_path, [count], "near").factors().missed["x"]
    assert missed == (3 * 200, 3 * (count - 2), 12 * (count - 2))
    monkeypatch.setattr(nesting, "MAX_ADDED_NOISE", missed.added_noise)
    layer_that_misses(tmp_path, [count], "near").factors()
    said = r"'w8a8' cannot be nested: 3 % of the integers of 'x' change, and its misses add 1\.44 times "
    with refused(f"{said}INT8's own rounding noise, allowed is 1.2: quantise both"):
        layer_that_misses(tmp_path, [count + 1], "near").factors()


def test_exceptions_alone_are_exact(tmp_path):
    layer = layer_that_misses(tmp_path, [0, 1, 2], "exact")
    assert layer.factors().missed["x"].changed == 0
    weight8, scale8, _ = layer._weights["x"]
    found, scale = as_stored(layer, tmp_path)
    assert torch.equal(found.read(None), load_tensor(weight8))
    assert is_nearest(found, scale, weight8, scale8)
    with refused("3 of 1800 integers of 'x' are out of reach, and none may change"):
        layer_that_misses(tmp_path, [0, 1, 3], "exact").factors()


def test_steps_that_no_merge_takes_are_told(tmp_path, monkeypatch):
    layer = layer_that_misses(tmp_path, [2], "near")
    with monkeypatch.context() as patch:
        patch.setattr(nesting, "WIDTHS", (1.2,))
        layer.factors()
    weight8, scale8, _ = layer._weights["x"]
    assert not is_nearest(*as_stored(layer, tmp_path), weight8, scale8)


def within_reach(folder: Path, nested_pair: dict[str, Path]) -> dict[str, Path]:
    """Return W4A16, and W8A8 of the weights that it stands for: 4 bits reach all integers."""
    stored = tensors_of(nested_pair["w4a16"])
    eight = shutil.copytree(nested_pair["w8a8"], folder / "w8a8")
    packed = ("_packed", "_shape", "_zero_point")
    tensors: StateDict = {k: v for k, v in stored.items() if not k.endswith(packed)}
    for name in [name.removesuffix("_packed") for name in stored if name.endswith("_packed")]:
        scale = stored[f"{name}_scale"].float()
        values = nibbles(stored[f"{name}_packed"].numpy(), axis=1) - 8
        zero = nibbles(stored[f"{name}_zero_point"].numpy(), axis=0) - 8
        of_groups = torch.from_numpy(values).unflatten(1, (scale.shape[1], -1))
        of_zero = of_groups - torch.from_numpy(zero)[..., None]
        tensors |= quantise_int8(name, (of_zero * scale[..., None]).flatten(1))
    save_file(tensors, eight / "model.safetensors", metadata={"format": "pt"})
    return nested_pair | {"w8a8": eight}


def test_exact_keeps_every_integer_or_refuses(tmp_path, nested_pair):
    with refused(r"\d+ of \d+ integers .* none may change with --nested-exact: take"):
        merge_checkpoints(nested_pair, tmp_path / "merged", nested="exact")
    assert not list(tmp_path.iterdir())
    sources = within_reach(tmp_path, nested_pair)
    merge_checkpoints(sources, tmp_path / "merged", nested="exact")
    split_checkpoint(tmp_path / "merged", "w8a8", tmp_path / "split")
    assert_equal(tensors_of(tmp_path / "split"), tensors_of(sources["w8a8"]))
    assert MergedCheckpoint.open(tmp_path / "merged").provenance.changed_integers == {"w8a8": 0}


def test_another_format_of_int4_nests_the_same(tmp_path, nested_pair, nested_once):
    sources = nested_pair | {"w4a16": write_foreign(nested_pair["w4a16"], tmp_path / "awq", "awq")}
    merge_checkpoints(sources, tmp_path / "again", nested="near")
    assert_equal(tensors_of(tmp_path / "again"), tensors_of(nested_once))


def test_the_config_names_the_source_in_nested_checkpoints_alone(nested_pair, nested_once, tmp_path):
    section = config_of(nested_once)["quantization_config"]
    assert section["schema_version"] == 2
    nested_in = {name: v.get("nested_in") for name, v in section["variants"].items()}
    assert nested_in == {"w8a8": "w4a16", "w4a16": None}
    assert "nested_in" not in section["variants"]["w4a16"]
    assert MergedConfig.from_json(section).to_json() == section
    merge_checkpoints(nested_pair, tmp_path / "plain")
    plain = config_of(tmp_path / "plain")["quantization_config"]
    assert plain["schema_version"] == 1 and not any("nested_in" in v for v in plain["variants"].values())
    assert "changed_integers" not in json.loads((tmp_path / "plain" / PROVENANCE_FILE).read_text())


def test_bytes_are_those_that_are_stored(nested_once):
    checkpoint = MergedCheckpoint.open(nested_once)
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
    more = sum(checkpoint.tensors[key].nbytes for key in packed)
    assert loaded["w8a8"]["w8a8"] == {"0-1": eight.own_bytes + more}


def test_command_line(nested_pair, tmp_path, capsys):
    output, named = str(tmp_path / "merged"), [f"{name}={folder}" for name, folder in nested_pair.items()]
    assert main(["merge", "--nested-exact", *named, "--output", output]) == 1
    assert "none may change" in capsys.readouterr().err
    assert main(["merge", "--nested", *named, "--output", output]) == 0
    said = r"w8a8: 4\.\d+ bits a weight in its linears, [89]\.\d+ with w4a16's; [\d.]+ % of its integers "
    said += r"changed, which adds [\d.]+ % to INT8's own rounding noise"
    for command in (["inspect", output], None):
        text = capsys.readouterr().out
        assert "w8a8 (nested in w4a16)" in text and re.search(said, text)
        if command:
            assert main(command) == 0
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "| `w8a8` (nested in w4a16) |" in card and "nested weights as they are served" in card
    assert main(["verify", output, "--against", *named]) == 0
    said = "tensors equal to w8a8, nested weights as near as 4 bits and exceptions reach"
    assert said in capsys.readouterr().out
