# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""``flexquant quantize``: its summary, its JSON, and the README's command as it stands."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path

import pytest

from flexquant import cli
from tests import readme
from tests.checkpoints import make_checkpoint
from tests.quantize.folders import section
from tests.quantize.quantizing import FEW

OPTIONS = [argument for key, value in FEW.items() for argument in (f"--{key}", str(value))]


def test_summary_and_json(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["quantize", str(model), "--output", str(tmp_path / "variants"), *OPTIONS, "--json"]
    assert cli.main([*command, "--variants", "w8a8"]) == 0
    first, second, lost, *table, last = capsys.readouterr().out.splitlines()
    assert first.startswith("w8a8: ") and "6 groups of linears smoothed" in first
    assert "alpha searched per layer: quantisation MSE" in second
    assert lost.startswith("lost against the 16-bit model") and table[0].startswith("text ")
    (variant,) = json.loads(last)["variants"].values()
    assert {row.split()[0] for row in table[1:] if "%" in row} >= variant["losses"].keys()
    assert variant["num_bytes"] == (tmp_path / "variants/w8a8/model.safetensors").stat().st_size

    assert cli.main([*command, "--recipe", "rtn", "--variants", "w4a16", "--resume"]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert "groups of 128" in first and list(json.loads(last)["variants"]) == ["w4a16"]
    assert cli.main([*command, "--recipe", "rtn", "--variants", "w4a16", "--resume"]) == 0
    assert "kept from an earlier run" in capsys.readouterr().out


def test_a_recipe_file_with_a_mistake(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("schema: flexquant.recipe/v1\nvariants:\n  w8a8:\n    GPTQModifer: {}\n")
    command = ["quantize", str(model), "--output", str(tmp_path / "out"), "--recipe", str(file)]
    assert cli.main(command) == 1
    assert "line 4: variants.w8a8.GPTQModifer is an unknown key" in capsys.readouterr().err


def test_without_llmcompressor(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *a: None if name == "llmcompressor" else find_spec(name, *a)
    )
    assert cli.main(["quantize", str(model), "--output", str(tmp_path / "variants")]) == 1
    assert "install flexquant[quantize] in an environment of its own" in capsys.readouterr().err


def test_the_readmes_commands(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-model").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    commands = [c for c in readme.commands() if c.startswith(("flexquant quantize", "flexquant build"))]
    for command in commands:
        assert cli.main([*shlex.split(command)[1:], *OPTIONS]) == 0
    assert {p.name for p in (tmp_path / "my-variants").iterdir()} == {"calibration.jsonl", "w8a8", "w4a16"}
    assert {p.name for p in tmp_path.iterdir()} > {"my-model-merged", "my-other-variants"}


def test_the_readmes_recipe(tmp_path: Path) -> None:
    # Large enough that one unit is less than the recipe's budget.
    model = make_checkpoint(tmp_path / "model", scheme=None, num_layers=4)
    (tmp_path / "recipe.yaml").write_text(readme.documents("flexquant.recipe/v1")[0])
    command = ["quantize", str(model), "--output", str(tmp_path / "variants"), *OPTIONS]
    assert cli.main([*command, "--recipe", str(tmp_path / "recipe.yaml")]) == 0
    ignored = section(tmp_path / "variants/w8a8")["ignore"]
    assert len(ignored) > 1 and "lm_head" in ignored
