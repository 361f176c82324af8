# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A published INT4 checkpoint is served wherever its settings lie, and whether it is a folder or an id."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from flexquant.checkpoint.served_config import is_published_int4, read_merged_config, read_model_config
from tests import programs
from tests.checkpoints import make_checkpoint
from tests.foreign import write_foreign
from tests.hub import Hub, serving
from tests.publishers import edits

PARSE = """
import json, sys
from flexquant.serving.registration import SingleVariantParser
found, config = SingleVariantParser().parse(sys.argv[1], False)
print(json.dumps([found["architectures"], found["quantization_config"], config.architectures]))
"""
SETTINGS_FILES = {
    "awq": edits.settings_in("quant_config.json", bits="w_bit", group_size="q_group_size"),
    "gptq": edits.settings_in("quantize_config.json"),
}


@pytest.fixture(scope="module")
def w4a16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "w4a16", scheme="w4a16")


@pytest.mark.parametrize("method", SETTINGS_FILES)
def test_settings_in_a_file_of_their_own_are_read(method: str, w4a16: Path, tmp_path: Path) -> None:
    whole = write_foreign(w4a16, tmp_path / "whole", method)
    apart = write_foreign(w4a16, tmp_path / "apart", method)
    SETTINGS_FILES[method](apart)
    assert is_published_int4(apart)
    expected, found = read_merged_config(whole), read_merged_config(apart)
    read = {config.variants["w4a16"].quantization_config["quant_method"] for config, _ in (expected, found)}
    groups = [
        config.variants["w4a16"].quantization_config["config_groups"] for config, _ in (expected, found)
    ]
    assert read == {method} and groups[0] == groups[1] and groups[0]["group_0"]["weights"]["group_size"] == 64

    hub = Hub({"org/apart": apart})
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
    }
    with serving(hub):
        environment |= {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
        parsed = [
            json.loads(
                programs.run(
                    [sys.executable, "-c", PARSE, model], timeout=120, environment=environment
                ).stdout.splitlines()[-1]
            )
            for model in (str(apart), "org/apart")
        ]
    config, _ = read_model_config(apart)
    expected_parse = [config["architectures"], config["quantization_config"], config["architectures"]]
    assert parsed == [expected_parse] * 2
    asked = {name for kind, name, _ in hub.requests if kind == "GET"}
    assert not [name for name in asked if name.endswith(".safetensors")]
