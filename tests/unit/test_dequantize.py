# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Every stored form of a Linear comes back as the weight it stands for, with the noise it really has."""

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import save_file

from flexquant.checkpoint.loadable import check_loadable
from flexquant.merge.formats import open_source
from flexquant.merge.kv.dequantize import WeightReader
from tests.refusals import refused

MODULE = "model.layers.0.self_attn.k_proj"
GROUP = 32


def one_layer(folder: Path, tensors: dict[str, torch.Tensor], weights: dict, **section) -> WeightReader:
    """Write a checkpoint that is one Linear, MODULE, and return its reader."""
    folder.mkdir(exist_ok=True)
    named = {f"{MODULE}.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "symmetric": True, **weights}}
    form = "pack-quantized" if "weight_packed" in tensors else "int-quantized"
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "format": form}
    document = {"architectures": ["LlamaForCausalLM"], "quantization_config": config | section}
    (folder / "config.json").write_text(json.dumps(document))
    return WeightReader(open_source("variant", folder))


def check_loads(reader: WeightReader) -> None:
    check_loadable(reader.source.quantization_config, reader.source.tensors, reader.source.owner)


def gaussian(rows: int = 48, columns: int = 128) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(rows, columns)


def int4_groups(w: torch.Tensor, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes int8 [out, in], scales and zero points [out, in / GROUP] of INT4 rounding."""
    grouped = w.unflatten(1, (-1, GROUP))
    if symmetric:
        scale = grouped.abs().amax(2) / 7.5
        zero = torch.zeros_like(scale)
    else:
        low, high = grouped.amin(2).clamp_max(0), grouped.amax(2).clamp_min(0)
        scale = (high - low) / 15
        zero = torch.round(-8 - low / scale)
    codes = torch.round(grouped / scale[..., None]) + zero[..., None]
    return codes.clamp(-8, 7).to(torch.int8).flatten(1), scale, zero.to(torch.int8)


def check(reader: WeightReader, original: torch.Tensor, relative_error: float) -> None:
    """Assert that the weight is close to the original, and as close as the reader says."""
    read = reader.open(MODULE).read()
    weight, variance = read.matrix(), read.variances()  # the next read overwrites the rest
    assert weight.dtype == torch.float32 and weight.shape == variance.shape == original.shape
    error = (weight - original).square().mean().sqrt()
    assert error / original.square().mean().sqrt() < relative_error
    assert 0.85 < error / variance.mean().sqrt() < 1.2
    part = reader.open(MODULE).read([range(7, 30)])
    assert torch.equal(part.matrix(), weight[7:30]) and torch.equal(part.variances(), variance[7:30])


@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_int4_groups(tmp_path, symmetric):
    w = gaussian()
    codes, scale, zero = int4_groups(w, symmetric)
    zeros = {} if symmetric else {"weight_zero_point": pack_to_int32(zero, 4, packed_dim=0)}
    check(one_layer(tmp_path, packed_int4(codes, scale) | zeros, INT4 | {"symmetric": symmetric}), w, 0.12)


def packed_int4(codes: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    shape = torch.tensor(codes.shape)
    return {"weight_packed": pack_to_int32(codes, 4), "weight_scale": scale, "weight_shape": shape}


INT4 = {"num_bits": 4, "strategy": "group", "group_size": GROUP}


@pytest.fixture
def packed() -> dict[str, torch.Tensor]:
    """Return the parameters of a Linear [48, 128] in symmetric INT4 groups."""
    codes, scale, _ = int4_groups(gaussian(), symmetric=True)
    return packed_int4(codes, scale)


@pytest.mark.parametrize("actorder", ["group", "dynamic", True, None])
def test_inputs_in_another_order_are_refused_since_vllm_does_not_undo_it(tmp_path, packed, actorder):
    if actorder is None:  # the tensor alone says so
        packed["weight_g_idx"] = torch.randperm(128).int() // GROUP
    reader = one_layer(tmp_path, packed, {**INT4, "actorder": actorder})
    with refused("another order .*vLLM does not undo .*'static'.*quantise (it|the model) again"):
        check_loads(reader)


@pytest.mark.parametrize("actorder", ["static", "weight", False])
def test_an_order_that_was_only_there_when_quantising_is_none(tmp_path, packed, actorder):
    reader = one_layer(tmp_path, packed, {**INT4, "actorder": actorder})
    check_loads(reader)
    check(reader, gaussian(), 0.12)


@pytest.mark.parametrize(
    ("changes", "scheme", "problem"),
    [
        ({"weight_scale": torch.ones(48, 3)}, INT4, r"weight_scale of shape \[48, 3\], expected \[48, 4\]"),
        ({"weight_scale": torch.ones(4, 48)}, INT4, r"weight_scale of shape \[4, 48\]"),
        ({"weight_scale": torch.ones(48)}, INT4, r"weight_scale of shape \[48\]"),
        ({"weight_scale": None}, INT4, "has no weight_scale"),
        ({}, INT4 | {"num_bits": 8}, r"weight of shape \[48, 16\], expected \[48, 32\]"),
        ({}, INT4 | {"group_size": 16}, r"weight_scale of shape \[48, 4\], expected \[48, 8\]"),
        ({}, INT4 | {"strategy": "channel", "group_size": None}, r"expected \[48, 1\]"),
        ({"weight_packed": torch.zeros(48, 16).bfloat16()}, INT4, "its weight as BF16, expected I32"),
        ({"weight_packed": torch.zeros(48, 8, dtype=torch.int64)}, INT4, "its weight as I64, expected I32"),
        ({"weight_packed": torch.zeros(0, 16, dtype=torch.int32)}, INT4, "expected a matrix"),
        ({"weight_packed": torch.zeros(48, dtype=torch.int32)}, INT4, "expected a matrix"),
        ({"weight_shape": torch.tensor([48, 120])}, INT4, r"weight of shape \[48, 16\], expected \[48, 15\]"),
        ({"weight_shape": torch.tensor([64, 128])}, INT4, r"_shape' \[64, 128\], which does not fit"),
        ({"weight_shape": torch.tensor([48, 0])}, INT4, r"_shape' \[48, 0\], which does not fit"),
        ({"weight_shape": torch.tensor([48])}, INT4, r"as I64 \[1\], expected I64 or I32 \[2\]"),
        ({"weight_shape": torch.tensor([48.0, 128.0])}, INT4, "as F32"),
        ({"weight_shape": None}, INT4, "without '.*weight_shape'"),
        ({}, INT4 | {"symmetric": False}, "asymmetric but has no weight_zero_point"),
        *(
            ({"weight_zero_point": zeros}, INT4 | {"symmetric": symmetric}, f"weight_zero_point of {problem}")
            for zeros, symmetric, problem in (
                (torch.zeros(48, 4, dtype=torch.int32), False, r"shape \[48, 4\], expected \[6, 4\]"),
                (torch.zeros(24, 4, dtype=torch.int8), False, r"shape \[24, 4\], expected \[48, 4\]"),
                (torch.zeros(48, dtype=torch.int32), True, r"shape \[48\], expected \[6, 4\]"),
            )
        ),
        ({"bias": torch.zeros(128)}, INT4, r"bias of shape \[128\], expected \[48\]"),
    ],
)
def test_parameters_that_do_not_fit_are_refused_by_their_shapes(tmp_path, packed, changes, scheme, problem):
    tensors = {name: tensor for name, tensor in {**packed, **changes}.items() if tensor is not None}
    reader = one_layer(tmp_path, tensors, scheme)
    with refused(problem):
        reader.open(MODULE).read([range(48)])
    with refused(problem):
        check_loads(reader)


@pytest.mark.parametrize(
    ("scale", "scheme", "problem"),
    [
        (torch.ones(3, 3), {"block_structure": [16, 32]}, r"shape \[3, 3\], expected \[3, 4\]"),
        (torch.ones(3, 4), {"block_structure": [0, 32]}, r"blocks of \[0, 32\]"),
        (torch.ones(48, 1), {"strategy": "tensor"}, r"shape \[48, 1\], expected \[1\]"),
        (torch.ones(1), {"strategy": "channel"}, r"shape \[1\], expected \[48, 1\]"),
        (torch.ones(1, 1), {"strategy": "tensor"}, r"shape \[1, 1\], expected \[1\] or \[\]"),
    ],
)
def test_scales_of_fp8_that_do_not_fit_are_refused(tmp_path, scale, scheme, problem):
    tensors = {"weight": gaussian().to(torch.float8_e4m3fn), "weight_scale": scale}
    weights = {"type": "float", "strategy": "block", **scheme}
    reader = one_layer(tmp_path, tensors, weights, format="float-quantized")
    with refused(problem):
        check_loads(reader)


def test_a_scheme_that_cannot_be_read_is_passed_over_until_it_is_compared(tmp_path):
    tensors = {"weight_packed": torch.zeros(48, 12, dtype=torch.int32), "weight_scale": torch.ones(48, 1)}
    tensors["weight_shape"] = torch.tensor([48, 128])
    reader = one_layer(tmp_path, tensors, {"num_bits": 3, "strategy": "channel"})
    check_loads(reader)
    with refused(r"3-bit int.*cannot be compared"):
        reader.open(MODULE)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_channels(tmp_path, packed, symmetric):
    w = gaussian() + (0 if symmetric else 1)
    low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    scale = w.abs().amax(1, keepdim=True) / 127 if symmetric else (high - low) / 255
    zero = torch.zeros_like(scale) if symmetric else torch.round(-128 - low / scale)
    codes = (torch.round(w / scale) + zero).clamp(-128, 127).to(torch.int8)
    zero = zero.to(torch.int8)
    tensors = {"weight_scale": scale}
    if packed:
        tensors |= {"weight_packed": pack_to_int32(codes, 8), "weight_shape": torch.tensor(w.shape)}
    else:
        tensors["weight"] = codes
    if not symmetric:
        tensors["weight_zero_point"] = pack_to_int32(zero, 8, packed_dim=0) if packed else zero
    check(one_layer(tmp_path, tensors, {"strategy": "channel", "symmetric": symmetric}), w, 0.01)


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_fp8(tmp_path, strategy):
    w = gaussian()
    if strategy == "block":
        scale = w.reshape(3, 16, 4, 32).abs().amax((1, 3)) / 448
        spread = scale.repeat_interleave(16, 0).repeat_interleave(32, 1)
    else:
        scale = (w.abs().amax(1, keepdim=True) if strategy == "channel" else w.abs().amax().view(1)) / 448
        spread = scale
    tensors = {"weight": (w / spread).to(torch.float8_e4m3fn), "weight_scale": scale}
    weights = {"type": "float", "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = [16, 32]
    check(one_layer(tmp_path, tensors, weights, format="float-quantized"), w, 0.04)


@pytest.mark.parametrize("dtype,bits", [(torch.bfloat16, 8), (torch.float16, 11)])
def test_an_ignored_layer_is_read_as_stored(tmp_path, dtype, bits):
    w = gaussian()
    reader = one_layer(tmp_path, {"weight": w.to(dtype)}, {"strategy": "channel"}, ignore=[MODULE])
    assert reader.schemes.of(MODULE) is None
    assert torch.equal(reader.open(MODULE).read().matrix(), w.to(dtype).float())
    check(reader, w, 2.0**-bits)


def test_more_than_a_megabyte_is_read_in_order(tmp_path):
    w = gaussian(1100, 1024)
    scale = w.abs().amax(1, keepdim=True) / 127
    tensors = {"weight": torch.round(w / scale).to(torch.int8), "weight_scale": scale}
    check(one_layer(tmp_path, tensors, {"strategy": "channel"}), w, 0.01)


@pytest.mark.parametrize("ignore", [["re:.*k_proj"], ["lm_head", MODULE]])
def test_ignored_by_name_or_pattern(tmp_path, ignore):
    reader = one_layer(tmp_path, {"weight": gaussian()}, {"strategy": "channel"}, ignore=ignore)
    assert reader.schemes.of(MODULE) is None
    assert reader.schemes.of("model.layers.0.self_attn.v_proj") is not None


def test_a_name_is_more_specific_than_a_class(tmp_path):
    eight = {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}
    groups = {"group_0": eight, "group_1": {"targets": ["re:.*down_proj"], "weights": INT4}}
    reader = one_layer(tmp_path, {"weight": gaussian()}, {}, config_groups=groups)
    assert reader.schemes.of("model.layers.0.mlp.down_proj").weights.num_bits == 4
    assert reader.schemes.of(MODULE).weights.num_bits == 8


def test_unreadable_schemes_are_named(tmp_path):
    fp4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    tensors = {"weight_packed": torch.zeros(48, 64, dtype=torch.uint8), "weight_scale": torch.ones(48, 8)}
    reader = one_layer(tmp_path, tensors, fp4, format="nvfp4-pack-quantized")
    with refused(rf"{MODULE}.*'variant'.*nvfp4-pack-quantized \(4-bit float"):
        reader.open(MODULE).read()


def test_a_quantised_layer_without_a_scheme_is_named(tmp_path):
    tensors = {"weight": torch.zeros(4, 8, dtype=torch.int8), "weight_scale": torch.ones(4, 1)}
    reader = one_layer(tmp_path, tensors, {"strategy": "channel"}, ignore=[MODULE])
    with refused("stored as I8, but no config group quantises it"):
        reader.open(MODULE).read()


@pytest.mark.parametrize(
    ("weights", "section"),
    [
        ({"strategy": "sideways"}, {}),
        ({}, {"ignore": ["re:*"]}),
        ({}, {"ignore": ["re:a{4294967296}"]}),
        ({}, {"config_groups": {"group_0": {"targets": ["re:("], "weights": None}}}),
        ({}, {"config_groups": {"group_0": ["Linear"]}}),
        ({}, {"config_groups": None}),
        ({}, {"transform_config": "R1"}),
        ({}, {"transform_config": {"config_groups": {"R1": {"apply": "weight"}}}}),
    ],
)
def test_a_senseless_section_is_named(tmp_path, weights, section):
    with refused("variant 'variant' has a quantization_config that is not"):
        one_layer(tmp_path, {"weight": gaussian()}, weights, **section)
