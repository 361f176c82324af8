# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A file that is nested too deeply, or huge, is named in a sentence, whatever reads it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from flexquant.checkpoint.folder import read_config
from flexquant.cli import main
from flexquant.documents.json_text import MAX_DEPTH, parse_json
from flexquant.documents.texts import read_documents
from flexquant.documents.yaml_document import from_yaml
from flexquant.errors import FlexQuantError
from flexquant.layers.memory_fit import PlanLosses
from flexquant.serving.kernels import trial
from tests.refusals import refused

DEPTHS = [MAX_DEPTH + 1, 800, 980, 100_000]


def nested(depth: int, inside: str = "1") -> str:
    return '{"a":' * (depth % 2) + '[{"a":' * (depth // 2) + inside + "}]" * (depth // 2) + "}" * (depth % 2)


def test_the_bound_is_a_depth_of_64():
    assert MAX_DEPTH == 64
    for text in (nested(MAX_DEPTH), "[[], {}, 1]", "1"):
        assert parse_json(text) == json.loads(text) == from_yaml(text.encode(), "it", "policy", []).data


@pytest.mark.parametrize("depth", DEPTHS)
def test_what_nests_deeper_is_refused(depth, tmp_path):
    for read in (parse_json, lambda text: from_yaml(text.encode(), "it", "policy", [])):
        with pytest.raises((ValueError, FlexQuantError), match="^it(: nested too deep| has more than 64)"):
            read(nested(depth))
    (file := tmp_path / "texts.jsonl").write_text(f'{{"text": {nested(depth)}}}')
    with refused(r"texts.jsonl, line 1 is not JSON \(it has more than 64"):
        list(read_documents(str(file)))
    with refused("texts.jsonl cannot be read .*it has more than 64"):
        PlanLosses(file, "w8a8", [], 1, {})
    file.write_text(nested(depth))
    assert trial._read(file, {}) is None


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("inspect", "config.json"),
        ("inspect", "flexquant_provenance.json"),
        ("inspect", "model.safetensors.index.json"),
        ("merge", "config.json"),
        ("merge", "tokenizer.json"),
        ("merge", "tokenizer_config.json"),
        ("merge", "generation_config.json"),
        ("merge", "model.safetensors"),
    ],
)
def test_a_deep_file_of_a_checkpoint_is_named(command, name, depth, sources, merged, tmp_path, capsys):
    folder = Path(shutil.copytree(merged if command == "inspect" else sources["w4a16"], tmp_path / "source"))
    text = f'{{"b": {nested(depth)}}}'.encode()
    header = len(text).to_bytes(8, "little") if name.endswith(".safetensors") else b""
    (folder / name).write_bytes(header + text)
    arguments = [f"w4a16={folder}", f"w8a8={sources['w8a8']}", "--output", str(tmp_path / "out")]
    assert main([command, *([str(folder)] if command == "inspect" else arguments)]) == 1
    said = capsys.readouterr().err
    assert re.search(rf"error: .*{name} .*more than 64 lists and mappings", said) and said.count("\n") == 1


def test_a_huge_file_is_not_read(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(100_000_001)
    with refused("config.json has 100000001 bytes, and 100000000 are allowed"):
        read_config(tmp_path)
    with refused("it: the recipe has 1000001 bytes; write one of at most 1000000"):
        from_yaml(b" " * 1_000_001, "it", "recipe", [])
