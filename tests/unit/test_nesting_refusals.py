# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What cannot be nested is refused, and damage to what nested weights are computed from is found."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file, save_file

from flexquant.build import recipe_to_nest
from flexquant.checkpoint.folder import read_tensors
from flexquant.checkpoint.merged_checkpoint import PROVENANCE_FILE, MergedCheckpoint
from flexquant.checkpoint.merged_config import MergedConfig
from flexquant.checkpoint.safetensors_io import CASTS, load_tensor
from flexquant.documents.yaml_document import to_yaml
from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints, nesting, split_checkpoint, verify_checkpoint
from flexquant.merge.nesting import MAX_ADDED_NOISE, is_nearest
from flexquant.quantization.recipe import SCHEMA, Recipe, parse_recipe
from tests.checkpoints import flip_a_byte, make_checkpoint
from tests.foreign import assert_equal, config_of
from tests.publishers import edits
from tests.refusals import refused
from tests.unit.edits import in_float32, rotate_residual, smooth_norms
from tests.unit.nested import make_w4a16

LINEAR = "model.layers.1.mlp.down_proj"


@pytest.fixture
def merged(nested_once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(nested_once, tmp_path / "merged")


def of_llama(**options: object) -> Callable[[Path], Path]:
    return lambda folder: make_checkpoint(folder, **options)


def with_indices(folder: Path) -> Path:
    make_checkpoint(folder, scheme="w4a16")
    indices = torch.arange(256, dtype=torch.int32).flip(0) // 64
    edits.tensors(lambda state: state.update({f"{LINEAR}.weight_g_idx": indices}))(folder)
    return folder


def with_scales_in_32_bit(folder: Path) -> Path:
    make_checkpoint(folder, scheme="w4a16")
    of_scale = ".weight_scale"
    edits.tensors(lambda s: s.update({k: x.float() for k, x in s.items() if k.endswith(of_scale)}))(folder)
    return folder


def with_static_activations(folder: Path) -> Path:
    make_checkpoint(folder, scheme="w8a8")
    groups = config_of(folder)["quantization_config"]["config_groups"]
    groups["group_0"]["input_activations"] |= {"dynamic": False, "strategy": "tensor", "observer": "minmax"}
    edits.section(config_groups=groups)(folder)

    def add(state: dict[str, torch.Tensor]) -> None:
        modules = [name.removesuffix(".weight_scale") for name in state if name.endswith(".weight_scale")]
        state.update({f"{module}.input_scale": torch.ones(1) for module in modules})

    edits.tensors(add)(folder)
    return folder


W8A8, W4A16 = of_llama(scheme="w8a8"), of_llama(scheme="w4a16")
O_PROJ = ["re:.*o_proj$"]
WIDE = {"intermediate_size": 65600, "num_layers": 1, "hidden_size": 32}
TWICE = "which stores the weights of both"


def both_of(**config: int) -> dict[str, Callable[[Path], Path]]:
    four = lambda folder: make_w4a16(folder, None, True, **config)  # noqa: E731
    return {"w8a8": of_llama(scheme="w8a8", **config), "w4a16": four}


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
            f"'w8a8' cannot be nested in 'w4a16': '.*0.self_attn.o_proj' .* but is 16 bit in the one, and in "
            f"the other weights 4-bit int by group 64, .*{TWICE}",
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
            both_of(intermediate_size=255),
            f"'model.layers.0.mlp.down_proj' has an odd number of inputs; .*{TWICE}",
        ),
        (
            both_of(**WIDE),
            rf"'model.layers.0.mlp.down_proj' has 65600 inputs, and at most 65536 can be nested; .*{TWICE}",
        ),
        ({"w8a8": W8A8, "w4a16": with_indices}, "inputs in another order"),
        (
            {"w8a8": W8A8, "w4a16": with_scales_in_32_bit},
            f"has INT4 scales in F32, and is served in bfloat16, .*--dtype bfloat16 or float16, .*{TWICE}",
        ),
        (
            {"w4a16": W4A16, "w8a8": of_llama(scheme="w8a8", transform=in_float32(rotate_residual))},
            r"99 % of the integers of .* misses add \d+\.\d+ times INT8's own rounding noise, allowed is "
            rf"{MAX_ADDED_NOISE:g}: quantise both .*{TWICE}",
        ),
    ],
    ids=["no INT4", "FP8", "static activations", "two INT4 variants", "16 bit in W8A8", "16 bit in W4A16"]
    + ["experts", "odd inputs", "too many inputs", "another order", "scales in 32 bit", "rotated"],
)
def test_what_cannot_be_nested_is_refused_and_the_output_stays(tmp_path, made, problem):
    sources = {name: make(tmp_path / name) for name, make in made.items()}
    output = tmp_path / "merged"
    output.mkdir()
    (output / "config.json").write_text('{"of": "an earlier merge"}')
    before = sorted(tmp_path.iterdir())
    with refused(problem):
        merge_checkpoints(sources, output, nested="near", overwrite=True)
    assert sorted(tmp_path.iterdir()) == before
    assert {p.name: p.read_text() for p in output.iterdir()} == {"config.json": '{"of": "an earlier merge"}'}


PARTS = [f"w8a8 weight_{part}" for part in ("difference", "exception", "exception_input")]
PARTS += ["w4a16 weight_packed", "w4a16 weight_scale"]


@pytest.mark.parametrize("part", PARTS)
def test_a_flipped_bit_of_what_a_weight_is_computed_from_is_found(nested_pair, merged, tmp_path, part):
    variant, name = part.split()
    flip_a_byte(merged, f"{variant}.{LINEAR}.{name}")
    split = tmp_path / "split"
    for read in (lambda: verify_checkpoint(merged), lambda: split_checkpoint(merged, "w8a8", split)):
        with refused(rf"{variant}\.{LINEAR}\.{name}"):
            read()
    assert not split.exists()
    with refused(rf"1 of .*\({LINEAR}\.weight in "):
        verify_checkpoint(merged, {"w8a8": nested_pair["w8a8"]})


def test_verify_compares_with_the_sources(nested_pair, merged, tmp_path):
    found = verify_checkpoint(merged, nested_pair)
    counts = {name: len(read_tensors(folder)) for name, folder in nested_pair.items()}
    assert found["tensors_compared_with"] == counts and found["nested"] == ["w8a8"]
    other = make_checkpoint(tmp_path / "other", scheme="w8a8", transform=in_float32(smooth_norms(low=0.9)))
    with refused("tensors in .* differ from"):
        verify_checkpoint(merged, {"w8a8": other})


@pytest.mark.parametrize("part", ["w8a8 weight_row", "w8a8 weight_column", *PARTS[1:]])
def test_a_part_that_is_missing_or_of_another_shape_is_one_sentence(merged, tmp_path, part):
    variant, name = part.split()
    key = f"{variant}.{LINEAR}.{name}"
    shard = MergedCheckpoint.open(merged).tensors[key].file
    tensors = load_file(shard)
    for damaged in (None, tensors[key].flatten()[:-1].clone()):
        changed = {k: v for k, v in tensors.items() if k != key} | ({} if damaged is None else {key: damaged})
        save_file(changed, shard, metadata={"format": "pt"})
        (merged / "model.safetensors.index.json").unlink(missing_ok=True)
        with refused(r"weight_(difference|packed|shape)'.*(fetch|quantise)"):
            MergedCheckpoint.open(merged).variant_tensors("w8a8")


def test_weights_beyond_int8_are_refused(merged, tmp_path):
    edit(merged, "weight_row", lambda x: 2 * x)
    with refused(f"{LINEAR}.weight_difference.* beyond -128 to 127; fetch"):
        split_checkpoint(merged, "w8a8", tmp_path / "split")
    assert not (tmp_path / "split").exists()


@pytest.mark.parametrize(
    "change", [lambda x: x.flip(1), lambda x: x.clamp(min=int(x[:, -1].min())), lambda x: x + 256 - x[:, -1:]]
)
def test_exceptions_out_of_order_or_out_of_range_are_refused(merged, tmp_path, change):
    edit(merged, "weight_exception_input", change)
    with refused(f"{LINEAR}.weight_exception_input.* ascend within 0 to 255; fetch"):
        split_checkpoint(merged, "w8a8", tmp_path / "split")
    assert not (tmp_path / "split").exists()


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("weight_exception", lambda x: x.where(x != x[0, 0], x + 1)),
        ("weight_exception_input", lambda x: torch.cat([x[:, :1] // 2, x[:, 1:]], 1)),
        ("weight_row", lambda x: x * torch.nan),
    ],
)
def test_verify_finds_parts_that_a_merge_does_not_write(merged, nested_pair, part, change):
    edit(merged, part, change)
    with refused(rf"1 of .*\({LINEAR}\.weight in "):
        verify_checkpoint(merged, {"w8a8": nested_pair["w8a8"]})


def edit(folder: Path, part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change one part of LINEAR, in a checkpoint without recorded hashes."""
    key = f"w8a8.{LINEAR}.{part}"
    file = MergedCheckpoint.open(folder).tensors[key].file
    tensors = load_file(file)
    wide = tensors[key] if part == "weight_row" else tensors[key].int()  # torch computes little in uint16
    changed = change(wide).to(tensors[key].dtype)
    assert not torch.equal(changed, tensors[key])
    save_file(tensors | {key: changed.contiguous()}, file, metadata={"format": "pt"})
    (folder / PROVENANCE_FILE).unlink()


@pytest.mark.parametrize("source", ["w8a8", "fp8", "", "w4a16"])
def test_a_variant_nested_in_none_that_could_be_is_refused(merged, source):
    section = config_of(merged)["quantization_config"]
    section["variants"]["w8a8"]["nested_in"] = source
    if source == "w4a16":
        section["variants"]["w4a16"]["nested_in"] = "w8a8"
    with refused("'w8a8' has nested_in .* expected another variant that is not nested"):
        MergedConfig.from_json(section)


def test_what_is_stored_is_nearest_up_to_the_bound_of_noise(merged, nested_pair, monkeypatch):
    checkpoint, sources = MergedCheckpoint.open(merged), read_tensors(nested_pair["w8a8"])
    weight = checkpoint.nested_weights("w8a8")[f"{LINEAR}.weight"]
    wide = checkpoint.variant_tensors("w8a8")[f"{LINEAR}.weight_scale"]
    weight8, scale8 = sources[f"{LINEAR}.weight"], sources[f"{LINEAR}.weight_scale"]
    given, stored = (load_tensor(ref).float() for ref in (scale8, wide))
    far = weight.read(None).double() * (stored / given).double() - load_tensor(weight8).double()
    noise = 12 * float(far.square().mean())
    for bound, expected in ((noise * (1 + 1e-6), True), (noise * (1 - 1e-6), False)):
        monkeypatch.setattr(nesting, "MAX_ADDED_NOISE", bound)
        assert is_nearest(weight, wide, weight8, scale8) is expected
    monkeypatch.undo()
    assert not is_nearest(weight, wide, replace(weight8, dtype="U8"), scale8)


def test_a_scale_that_both_had_is_stored_once_for_each(tmp_path):
    """W8A8 has the integers and scales of W4A16, one scale a row, which it shares until it is nested."""
    four = make_w4a16(tmp_path / "w4a16", None, symmetric=True)
    eight = make_checkpoint(tmp_path / "w8a8", scheme="w8a8")
    stored, tensors = load_file(four / "model.safetensors"), load_file(eight / "model.safetensors")
    for name in [name for name, tensor in tensors.items() if tensor.dtype == torch.int8]:
        tensors[name] = unpack_from_int32(stored[f"{name}_packed"], 4, tensors[name].shape)
        tensors[f"{name}_scale"] = stored[f"{name}_scale"]
    save_file(tensors, eight / "model.safetensors", metadata={"format": "pt"})
    sources = {"w8a8": eight, "w4a16": four}
    merge_checkpoints(sources, tmp_path / "merged", nested="near")
    keys = read_tensors(tmp_path / "merged").keys()
    scale = f"{LINEAR}.weight_scale"
    assert {f"{name}.{scale}" for name in (*sources, "shared")} - keys == {f"shared.{scale}"}
    verify_checkpoint(tmp_path / "merged", sources)
    split_checkpoint(tmp_path / "merged", "w4a16", tmp_path / "split")
    assert_equal(load_file(tmp_path / "split" / "model.safetensors"), stored)


def test_verify_tells_of_a_tensor_under_two_prefixes(merged):
    scale = f"{LINEAR}.weight_scale"
    ref = MergedCheckpoint.open(merged).tensors[f"w8a8.{scale}"]
    twice = load_file(ref.file) | {f"shared.{scale}": load_tensor(ref)}
    save_file(twice, ref.file, metadata={"format": "pt"})
    (merged / "model.safetensors.index.json").unlink()
    with refused(f"has 'w4a16.{scale}' among the shared tensors too; merge it"):
        verify_checkpoint(merged)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_advised_dtype_nests_what_has_scales_in_32_bit(dtype, tmp_path):
    sources = {"w8a8": W8A8(tmp_path / "w8a8"), "w4a16": with_scales_in_32_bit(tmp_path / "w4a16")}
    merge_checkpoints(sources, tmp_path / "merged", nested="near", dtype=dtype)
    verify_checkpoint(tmp_path / "merged", sources)
    assert read_tensors(tmp_path / "merged")[f"w4a16.{LINEAR}.weight_scale"].dtype == CASTS[dtype]


def test_the_dtype_that_is_served_is_not_float32(tmp_path):
    sources = {"w8a8": W8A8(tmp_path / "w8a8"), "w4a16": W4A16(tmp_path / "w4a16")}
    for folder in sources.values():
        edits.config(dtype="float32")(folder)
    with refused("INT4 scales in BF16, and is served in bfloat16 or float16, to"):
        merge_checkpoints(sources, tmp_path / "merged", nested="near")


def by_gptq(schemes: dict[str, str]) -> Recipe:
    variants = {name: {"GPTQModifier": {"scheme": scheme}} for name, scheme in schemes.items()}
    return parse_recipe(to_yaml({"schema": SCHEMA, "variants": variants}).encode(), "my.yaml", "my")


@pytest.mark.parametrize(
    ("schemes", "said"),
    [
        ({"a": "FP8_DYNAMIC", "b": "W4A16"}, "nothing of a, b can be nested: that takes a variant in W8A8"),
        ({"a": "W8A16", "b": "W4A16"}, "nothing of a, b can be nested"),
        ({"a": "W8A8", "b": "W4A8"}, "nothing of a, b can be nested"),
        ({"a": "W8A8", "b": "W4A16", "c": "W4A16"}, "b and c have INT4 weights and 16-bit activations"),
    ],
)
def test_a_recipe_that_no_merge_would_nest_is_refused(schemes: dict[str, str], said: str) -> None:
    with pytest.raises(FlexQuantError, match=said):
        recipe_to_nest(by_gptq(schemes))


def test_w8a8_alone_is_nested_and_in_w4a16() -> None:
    schemes = {"a": "W8A8", "b": "W4A16", "c": "W4A8", "d": "W8A16", "e": "W8A8"}
    nested = recipe_to_nest(by_gptq(schemes)).variants
    assert {n: v.nested_in for n, v in nested.items()} == {**dict.fromkeys(schemes), "a": "b", "e": "b"}
