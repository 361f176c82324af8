# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What AMD's Quark exports in INT8 is read number by number; what vLLM does not serve of it is refused."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig

from flexquant.checkpoint.model_config import JsonObject
from flexquant.merge import convert_checkpoint
from flexquant.merge.formats import open_source
from flexquant.merge.kv.dequantize import WeightReader
from tests.checkpoints import make_checkpoint
from tests.foreign import config_of, tensors_of
from tests.publishers import edits
from tests.publishers.quark import quark_int8
from tests.refusals import refused

DOWN = "model.layers.1.mlp.down_proj"


def exported(folder: Path, **options: Any) -> Path:
    made = make_checkpoint(folder, scheme=None)
    quark_int8(**options)(made)
    return made


def converted(quark: Path, folder: Path) -> Iterator[tuple[str, bool, set[str]]]:
    """Convert, compare numbers, yield each linear's name, whether it has scales by channel, its parts."""
    convert_checkpoint(quark, folder)
    stored, found = tensors_of(quark), tensors_of(folder)
    reader = WeightReader(open_source("w8a8", folder))
    linears = [key.removesuffix(".weight") for key in stored if key.endswith("_proj.weight")]
    assert len(linears) == 2 * 7
    for module in linears:
        scale = stored[f"{module}.weight_scale"]
        rows = scale[:, None] if scale.ndim == 1 else scale
        assert torch.equal(reader.open(module).read().matrix(), stored[f"{module}.weight"].float() * rows)
        parts = {key.rpartition(".")[2]: t for key, t in found.items() if key.startswith(f"{module}.")}
        assert parts["weight_scale"].shape == rows.shape
        for name in parts.keys() - {"weight_scale"}:
            assert torch.equal(parts[name], stored[f"{module}.{name}"]), name
        yield module, scale.ndim == 1, {*parts}


@pytest.mark.parametrize("by", ["per_tensor", "per_channel"])
@pytest.mark.parametrize(("static", "symmetric"), [(True, True), (True, False), (False, True)])
def test_numbers_are_those_of_quarks_rule(by, static, symmetric, tmp_path):
    quark = exported(tmp_path / "quark", by=by, static=static, symmetric=symmetric)
    kept = {"weight", "weight_scale"} | ({"input_scale"} if static else set())
    kept |= set() if symmetric else {"input_zero_point"}
    for _, by_channel, parts in converted(quark, tmp_path / "converted"):
        assert by_channel is (by == "per_channel") and parts == kept
    section = config_of(tmp_path / "converted")["quantization_config"]
    group = section["config_groups"]["group_0"]
    assert section["ignore"] == ["lm_head"] and section["format"] == "int-quantized"
    assert group["weights"]["strategy"] == by.removeprefix("per_")
    inputs = group["input_activations"]
    expected = ("tensor" if static else "token", not static, symmetric)
    assert (inputs["strategy"], inputs["dynamic"], inputs["symmetric"]) == expected


def schemes_of(quark: Path, linears: Iterable[str]) -> dict[str, tuple[str, bool, bool]]:
    """Return what vLLM reads of linears, for Quark's settings as for those that they are read as.

    That is how weights are scaled, whether activations are static, and whether they are symmetric.
    """
    theirs = QuarkConfig.from_config(config_of(quark)["quantization_config"])
    section = open_source("w8a8", quark).quantization_config
    ours: Any = compressed_tensors.CompressedTensorsConfig.from_config(section)
    theirs.packed_modules_mapping = ours.packed_modules_mapping = FUSED
    layer, found = torch.nn.Linear(1, 1, device="meta"), {}
    for name in linears:
        weight_key, input_key, kind = theirs.get_scheme_cls(type(layer), name)
        stock: Any = theirs.init_scheme(kind, weight_key, input_key)
        read: Any = ours.get_scheme(layer, name)
        assert type(read).__name__ == "CompressedTensorsW8A8Int8"
        found[name] = (f"per_{read.strategy}", read.is_static_input_scheme, read.input_symmetric)
        assert found[name] == (stock.qscheme, stock.is_static_input_scheme, stock.input_symmetric), name
    return found


def test_vllm_reads_the_same_scheme(tmp_path):
    for by in ("per_tensor", "per_channel"):
        for static, symmetric in ((True, True), (True, False), (False, True), (False, False)):
            options = {"by": by, "static": static, "symmetric": symmetric}
            assert schemes_of(exported(tmp_path / str(options), **options), [DOWN]), options


FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
CHANNELS = {"by": "per_channel", "static": False}
BY_LAYER = {"*layers.1.mlp.*": CHANNELS, "*.mlp.*": {"symmetric": False}, DOWN: {}}
BY_LAYER |= {"model.layers.0.self_attn.o_proj": CHANNELS}
"""The second pattern fits what the first does, and the third as well."""


def test_vllm_reads_the_same_scheme_of_every_layer(tmp_path):
    quark = exported(tmp_path / "quark", by="per_tensor", static=True, layers=BY_LAYER)
    by_layer = layer_settings(quark) | dict.fromkeys(("*lm_head", "o_proj"), {"weight": None})
    by_layer["model.layers.1.self_attn.o_proj.weight"] = by_layer["*layers.1.mlp.*"]
    edits.section(layer_quant_config=by_layer)(quark)
    parts = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    found = schemes_of(quark, [f"model.layers.{number}.{part}" for number in (0, 1) for part in parts])
    channel = [DOWN, "model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"]
    assert {found[name] for name in channel} == {("per_channel", False, True)}
    assert found["model.layers.0.mlp.down_proj"] == ("per_tensor", True, False)
    assert len(set(found.values())) == 3


def test_numbers_of_layers_with_settings_of_their_own_are_kept(tmp_path):
    quark = exported(tmp_path / "quark", by="per_tensor", static=True, layers=BY_LAYER)
    for module, by_channel, parts in converted(quark, tmp_path / "converted"):
        first_o_proj = module.endswith("0.self_attn.o_proj")
        assert by_channel is (first_o_proj or module.startswith("model.layers.1.mlp"))
        zeros = not by_channel and ".0.mlp." in module
        assert ("input_scale" in parts, "input_zero_point" in parts) == (not by_channel, zeros)
    section = config_of(tmp_path / "converted")["quantization_config"]
    assert section["ignore"] == ["lm_head"]
    named = [name for group in section["config_groups"].values() for name in group["targets"]]
    assert len(section["config_groups"]) == 3 and len(named) == len(set(named)) == 2 * 7


def layer_settings(folder: Path) -> JsonObject:
    found: JsonObject = config_of(folder)["quantization_config"]["layer_quant_config"]
    return found


@pytest.mark.parametrize(
    ("parts", "layers", "exclude"),
    [
        ("qkv", {"*v_proj": CHANNELS}, []),
        ("gate_up", {"*up_proj": {"symmetric": False}}, []),
        ("qkv", {}, ["model.layers.0.self_attn.k_proj"]),
    ],
)
def test_parts_of_what_vllm_fuses_need_one_setting(parts, layers, exclude, tmp_path):
    quark = exported(tmp_path / "quark", by="per_tensor", static=True, layers=layers)
    edits.section(exclude=["lm_head", *exclude])(quark)
    in_16_bit = {f"{module}.weight": torch.zeros(64, 128).bfloat16() for module in exclude}
    edits.tensors(lambda state: state.update(in_16_bit))(quark)
    either = f"({'|'.join(parts.split('_') if '_' in parts else parts)})_proj"
    with refused(rf"{either} and .*{either} quantised in different ways"):
        convert_checkpoint(quark, tmp_path / "converted")
    theirs = QuarkConfig.from_config(config_of(quark)["quantization_config"])
    theirs.packed_modules_mapping = FUSED
    (fused,) = (name for name in ("self_attn.qkv_proj", "mlp.gate_up_proj") if f".{parts}_proj" in name)
    with pytest.raises(ValueError, match="different quantization (configuration|schemes)"):
        theirs.get_quant_method_target(f"model.layers.0.{fused}", LinearBase)


def of_all(part: str | None = None, **values: object) -> edits.Edit:
    """Change the settings of all linears, or of one part of them."""

    def change(content: JsonObject) -> None:
        settings = content["quantization_config"]["global_quant_config"]
        (settings if part is None else settings[part]).update(values)

    return edits.edit_json("config.json", change)


def filled(part: str, value: int) -> edits.Edit:
    return edits.tensors(lambda state: state[f"{DOWN}.{part}"].fill_(value))


INT8 = {"dtype": "int8", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (of_all("weight", dtype="fp8_e4m3"), "weight fp8_e4m3 per_tensor"),
        (of_all("weight", qscheme="per_group", group_size=32), "weight int8 per_group"),
        (of_all("weight", symmetric=False), "weight int8 per_tensor static with zero points"),
        (of_all("weight", qscheme="per_channel", ch_axis=1), "ch_axis 1"),
        (of_all("input_tensors", is_dynamic=True), "input_tensors int8 per_tensor dynamic"),
        (of_all("input_tensors", qscheme="per_channel"), "input_tensors int8 per_channel static"),
        (of_all(input_tensors=None), "input_tensors None"),
        (of_all(weight=[INT8, INT8]), r"weight \["),
        (of_all(output_tensors=INT8), "output_tensors"),
        (of_all(bias=INT8), "bias"),
        (edits.section(global_quant_config=None), "global_quant_config None"),
        (edits.section(layer_quant_config={"*down_proj": {}}), r"weight None in layer_quant_config '\*down"),
        (edits.section(layer_quant_config={"*down_proj": 8}), r"layer_quant_config '\*down_proj' 8"),
        (edits.section(layer_quant_config=["*down_proj"]), "layer_quant_config .*, expected an object"),
        (edits.section(layer_type_quant_config={"Linear": {}}), "layer_type_quant_config"),
        (edits.section(kv_cache_quant_config={"*k_proj": {}}), "kv_cache_quant_config"),
        (edits.section(export={"kv_cache_group": ["*k_proj"]}), "kv_cache_group"),
        (filled("weight_zero_point", 3), rf"{DOWN}.weight_zero_point"),
        (filled("input_zero_point", 3), rf"{DOWN}.input_zero_point"),
        (edits.without(f"{DOWN}.weight_scale"), rf"{DOWN}.weight_scale is missing"),
        (edits.without(f"{DOWN}.input_scale"), rf"{DOWN}.input_scale is missing"),
        (edits.tensors(lambda state: state.update(fake_quantized(state))), "no linear in INT8"),
    ],
)
def test_what_is_not_served_is_refused_by_its_setting(edit, message, tmp_path):
    quark = exported(tmp_path / "quark", by="per_tensor", static=True)
    edit(quark)
    with refused(message):
        open_source("w8a8", quark)


def fake_quantized(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights as Quark exports them with the weight_format fake_quantized: in 16 bit."""
    weights = {key: tensor for key, tensor in state.items() if key.endswith(".weight")}
    return {key: tensor.bfloat16() for key, tensor in weights.items() if tensor.dtype is torch.int8}
