# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A published INT4 checkpoint is served wherever its settings lie, and whether it is a folder or an id."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from flexquant.checkpoint.merged_config import is_published, read_merged_config, read_model_config
from flexquant.checkpoint.schemes import LinearSchemes
from flexquant.merge.packed_formats import read_settings
from tests import programs
from tests.foreign import write_foreign
from tests.hub import Hub, serving
from tests.publishers import edits
from tests.refusals import refused

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
