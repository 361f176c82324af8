# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Settings of GPTQ and AWQ, by layer and wherever they lie: each layer keeps its values and its scheme."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

from flexquant.checkpoint.merged_config import is_published, read_merged_config, read_model_config
from flexquant.checkpoint.schemes import LinearSchemes
from flexquant.errors import FlexQuantError
from flexquant.merge import convert_checkpoint
from flexquant.merge.formats import open_source
from flexquant.merge.packed_formats import read_settings
from tests import programs
from tests.checkpoints import make_checkpoint
from tests.foreign import assert_equal, config_of, gptq_tensors, tensors_of, write_foreign
from tests.hub import Hub, serving
from tests.publishers import edits
from tests.refusals import refused

DOWN = "model.layers.1.mlp.down_proj"
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def weights_of(folder: Path) -> dict[str, Any]:
    """Return what a converted checkpoint says of each linear's weights, by name."""
    groups = config_of(folder)["quantization_config"]["config_groups"].values()
    return {name: group["weights"] for group in groups for name in group["targets"]}


@pytest.mark.parametrize("symmetric", [True, False])
def test_values_of_a_layer_with_more_bits_are_kept(symmetric, w4a16, tmp_path):
    dynamic = {"-:.*lm_head": {}, r"+:.*\.1\.mlp\.down": {"bits": 8, "group_size": 32, "sym": symmetric}}
    foreign = write_foreign(w4a16, tmp_path / "gptq", "gptq", dynamic=dynamic)
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 256, (128, 256), generator=generator)
    zeros = torch.full((128, 8), 128) if symmetric else torch.randint(0, 256, (128, 8), generator=generator)
    scales = torch.rand((128, 8), generator=generator).bfloat16()
    own = gptq_tensors(values, zeros, scales, bits=8)
    edits.tensors(lambda state: state.update({f"{DOWN}.{part}": t for part, t in own.items()}))(foreign)
    convert_checkpoint(foreign, tmp_path / "converted")
    found = tensors_of(tmp_path / "converted")
    packed, scale, *_ = (found.pop(f"{DOWN}.weight_{part}") for part in ("packed", "scale", "shape"))
    assert torch.equal(unpack_from_int32(packed, 8, torch.Size((128, 256))).int() + 128, values.int())
    assert torch.equal(scale, scales)
    if not symmetric:
        stored = found.pop(f"{DOWN}.weight_zero_point")
        unpacked = unpack_from_int32(stored, 8, torch.Size((128, 8)), packed_dim=0)
        assert torch.equal(unpacked.int() + 128, zeros.int())
    assert_equal(found, {key: t for key, t in tensors_of(w4a16).items() if not key.startswith(DOWN)})
    read = weights_of(tmp_path / "converted")
    assert len(read) == 2 * 7
    down = read.pop(DOWN)
    assert (down["num_bits"], down["group_size"], down["symmetric"]) == (8, 32, symmetric)
    assert {(w["num_bits"], w["group_size"], w["symmetric"]) for w in read.values()} == {(4, 64, True)}


def test_the_first_pattern_that_fits_from_the_start_holds(w4a16, tmp_path):
    dynamic = {"mlp": {"bits": 8}, r"+:.*\.0\.mlp\.down_proj": {"group_size": 32}}
    dynamic |= {r".*\.mlp\.down_proj": {"bits": 8}}
    foreign = write_foreign(w4a16, tmp_path / "gptq", "gptq", dynamic=dynamic)
    edits.requantised(r".*\.0\.mlp\.down_proj", group_size=32)(foreign)
    edits.requantised(r".*\.1\.mlp\.down_proj", bits=8)(foreign)
    convert_checkpoint(foreign, tmp_path / "converted")
    read = weights_of(tmp_path / "converted")
    found = {f"layer {n}": read.pop(f"model.layers.{n}.mlp.down_proj") for n in (0, 1)}
    sizes = {name: (w["num_bits"], w["group_size"]) for name, w in found.items()}
    assert sizes == {"layer 0": (4, 32), "layer 1": (8, 64)}
    assert {(w["num_bits"], w["group_size"]) for w in read.values()} == {(4, 64)}


def test_vllm_reads_the_same_scheme_of_every_layer(w4a16, tmp_path):
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
    from vllm.model_executor.layers.quantization.utils.gptq_utils import override_config

    pattern = r".*\.1\."
    dynamic = {f"+:{pattern}": {"bits": 8, "group_size": 32}}
    foreign = write_foreign(w4a16, tmp_path / "gptq", "gptq", dynamic=dynamic)
    edits.requantised(pattern, bits=8, group_size=32)(foreign)
    section = open_source("w4a16", foreign).quantization_config
    ours: Any = compressed_tensors.CompressedTensorsConfig.from_config(section)
    ours.packed_modules_mapping = FUSED
    for number in (0, 1):
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
            prefix = f"model.layers.{number}.{name}"
            theirs = AutoGPTQConfig.from_config(config_of(foreign)["quantization_config"])
            override_config(theirs, prefix)
            read = ours.get_scheme_dict(torch.nn.Linear(1, 1, device="meta"), prefix)["weights"]
            expected = (theirs.weight_bits, theirs.group_size, theirs.is_sym)
            assert (read.num_bits, read.group_size, read.symmetric) == expected, prefix


def test_experts_have_settings_of_their_own(tmp_path):
    made = make_checkpoint(tmp_path / "compressed", "qwen2_moe", "w4a16", num_layers=1, group_size=32)
    attention, model = r".*\.(q|k|v|o)_proj", {"architecture": "qwen2_moe", "num_layers": 1, "group_size": 32}
    dynamic = {f"+:{attention}": {"bits": 8}}
    foreign = write_foreign(made, tmp_path / "gptq", "gptq", dynamic=dynamic)
    edits.requantised(attention, bits=8, **model)(foreign)
    convert_checkpoint(foreign, tmp_path / "converted")
    read = weights_of(tmp_path / "converted")
    assert len([name for name, w in read.items() if w["num_bits"] == 8 and "_attn." in name]) == 4
    assert {w["num_bits"] for name, w in read.items() if "_attn." not in name} == {4}
    assert len([name for name in read if ".experts." in name]) == 4 * 3
    one = r".*experts\.2\."
    edits.section(dynamic={**dynamic, f"+:{one}": {"bits": 8}})(foreign)
    edits.requantised(one, bits=8, **model)(foreign)
    with refused(r"experts\.\d\.\w+_proj and .*experts\.\d\.\w+_proj quantised in"):
        convert_checkpoint(foreign, tmp_path / "again")


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ({"+:.*down": {"bits": 3}}, "3 bits"),
        ({"+:.*down": {"group_size": 0}}, "group_size 0"),
        ({"+:.*down": {"desc_act": True}}, None),
        ({"-:.*lm_head": None}, None),
        ({"+:.*down": 8}, "'dynamic'.* 8, expected"),
        ({"+:(": {"bits": 8}}, r"'\+:\('.*'dynamic'"),
        ({"+:a{4294967296}": {"bits": 8}}, "4294967296.*'dynamic'"),
        (["+:.*down"], "has dynamic"),
        ({"+:.*v_proj": {"bits": 8}}, r"(q|k|v)_proj and .*(q|k|v)_proj quantised in different ways"),
        ({"+:.*up_proj": {"bits": 8}}, r"(gate|up)_proj and .*(gate|up)_proj quantised in different ways"),
        ({"+:.*down_proj": {"group_size": 32}}, r"down_proj\.scales is BF16 \[4, 128\] instead .*\[8, 128\]"),
    ],
)
def test_settings_that_do_not_fit_are_refused(dynamic, message, w4a16, tmp_path):
    foreign = write_foreign(w4a16, tmp_path / "gptq", "gptq", dynamic=dynamic)
    if message is None:  # the inputs are in order, and what is left out has no settings
        assert open_source("w4a16", foreign)
        return
    if "and" in message:
        edits.requantised(next(iter(dynamic)).removeprefix("+:"), bits=8)(foreign)
    with pytest.raises(FlexQuantError, match=message):
        convert_checkpoint(foreign, tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


PARSE = """
import json, sys
from flexquant.serving.registration import SingleVariantParser
for model in sys.argv[1:]:
    found, config = SingleVariantParser().parse(model, False)
    print(json.dumps([found["architectures"], found["quantization_config"], config.architectures]))
"""
SETTINGS_FILES = {
    "awq": edits.settings_in("quant_config.json", bits="w_bit", group_size="q_group_size"),
    "gptq": edits.settings_in("quantize_config.json"),
}


def test_settings_in_a_file_of_their_own_are_read(w4a16, tmp_path):
    expected_parse = []
    for method, move in SETTINGS_FILES.items():
        whole = write_foreign(w4a16, tmp_path / f"{method} whole", method)
        apart = write_foreign(w4a16, tmp_path / method, method)
        move(apart)
        assert is_published(apart)
        merged = [read_merged_config(folder)[0] for folder in (whole, apart)]
        sections = [config.variants["w4a16"].quantization_config for config in merged]
        groups = [section["config_groups"] for section in sections]
        assert {section["quant_method"] for section in sections} == {method} and groups[0] == groups[1]
        assert groups[0]["group_0"]["weights"]["group_size"] == 64
        config, _ = read_model_config(apart)
        parsed = [config["architectures"], config["quantization_config"], config["architectures"]]
        expected_parse += [parsed] * 2
    hub = Hub({f"org/{method}": tmp_path / method for method in SETTINGS_FILES})
    models = [model for method in SETTINGS_FILES for model in (tmp_path / method, f"org/{method}")]
    command = [sys.executable, "-c", PARSE, *models]
    with serving(hub):
        done = programs.run(command, timeout=120, environment=hub.environment(tmp_path / "cache"))
    assert [json.loads(line) for line in done.stdout.splitlines()[-4:]] == expected_parse
    asked = {name for kind, name, _ in hub.requests if kind == "GET"}
    assert not [name for name in asked if name.endswith(".safetensors")]


AWQ, GPTQ = {"quant_method": "awq"}, {"quant_method": "gptq"}
IN_128 = {"num_bits": 4, "strategy": "group", "group_size": 128, "actorder": None}
CHANNEL = {**IN_128, "strategy": "channel", "group_size": None}
SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (AWQ, {**IN_128, "symmetric": False}),
    (AWQ | {"w_bit": "4", "q_group_size": 64, "zero_point": False}, {**IN_128, "group_size": 64}),
    (AWQ | {"bits": 4, "group_size": 32, "zero_point": None}, {"group_size": 32, "symmetric": False}),
    (GPTQ, {**IN_128, "symmetric": True}),
    (GPTQ | {"bits": "4", "group_size": -1, "sym": False}, {**CHANNEL, "symmetric": False}),
    (GPTQ | {"group_size": -1, "desc_act": True}, CHANNEL),
    (GPTQ | {"group_size": None, "desc_act": True}, {**IN_128, "actorder": "group"}),
]


@pytest.mark.parametrize(("section", "expected"), SETTINGS)
def test_settings_are_read_alike_by_all(section, expected, tmp_path):
    """All are serving, compressed-tensors' own reader, merging, and vLLM, which knows no defaults."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    config = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 2, "quantization_config": section}
    (tmp_path / "config.json").write_text(json.dumps(config))
    merged, _ = read_merged_config(tmp_path)
    served = merged.variants["w4a16"].quantization_config
    weights = served["config_groups"]["group_0"]["weights"]
    assert weights | expected == weights
    parsed = LinearSchemes(served, "here", ()).of("model.layers.0.mlp.up_proj")
    assert parsed is not None and parsed.weights is not None
    form = read_settings(tmp_path, section)
    for bits, size, symmetric in (
        (parsed.weights.num_bits, parsed.weights.group_size or -1, parsed.weights.symmetric),
        (form.bits, form.group_size, form.symmetric),
    ):
        assert (bits, size) == (weights["num_bits"], weights["group_size"] or -1)
        assert symmetric == weights["symmetric"]
    if section["quant_method"] == "gptq" and (weights["actorder"] or not symmetric):
        return  # vLLM serves neither
    in_vllm = get_quantization_config(section["quant_method"]).from_config(served)
    assert (in_vllm.group_size, in_vllm.pack_factor) == (weights["group_size"] or -1, 8)


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        (GPTQ | {"bits": "four"}, "bits 'four', expected a whole number"),
        (AWQ | {"zero_point": "no"}, "zero_point 'no', expected true or false"),
    ],
)
def test_settings_that_are_not_understood_are_named_once(section, problem, tmp_path):
    config = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 2, "quantization_config": section}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused(f"^{tmp_path} has {problem}, in its quantization_config"):
        read_merged_config(tmp_path)
    assert not is_published(tmp_path)
