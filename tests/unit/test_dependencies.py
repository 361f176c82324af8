# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What the package imports is declared, and not loaded before it is needed.

Checkpoints, policies and documents are read by processes that have neither torch nor vLLM loaded.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import programs

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {"yaml": "pyyaml"}
EXTRAS_OF_FOLDERS = {"quantization": ["quantize"], "serving": ["gpu", "cpu"]}
EXTRAS_OF_FILES = {
    "documents/texts.py": ["quantize"],  # datasets of Hugging Face, for calibration only
    "cli/quantize.py": ["quantize"],
}
ENGINE_AND_PLOTS = ["gpu", "eval"]
"""Extras of all other files, whose functions import them: commands that start engines or draw plots."""


def declared(extras: list[str]) -> set[str]:
    requirements = [
        *PROJECT["dependencies"],
        *(r for e in extras for r in PROJECT["optional-dependencies"][e]),
    ]
    return {re.match(r"[\w.-]+", r)[0].lower().replace("_", "-") for r in requirements}


def imported(file: Path) -> Iterator[str]:
    """Yield the distributions that a file imports, at its top or inside of functions."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            modules = [node.module]
        else:
            continue
        for top in {module.split(".")[0] for module in modules} - sys.stdlib_module_names - {"flexquant"}:
            yield DISTRIBUTIONS.get(top, top).replace("_", "-")


@pytest.mark.parametrize("folder", ["flexquant", "merge", "policies"])
def test_every_import_is_declared(folder):
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    missing = {}
    for file in files:
        place = file.relative_to(ROOT / folder)
        extras = EXTRAS_OF_FILES.get(str(place)) or EXTRAS_OF_FOLDERS.get(place.parts[0], ENGINE_AND_PLOTS)
        if unknown := sorted(set(imported(file)) - declared(extras)):
            missing[str(place)] = unknown
    assert not missing


IMPORT_ALL = """
import importlib, json, pkgutil, sys
package = importlib.import_module(sys.argv[1])
names = [m.name for m in pkgutil.iter_modules(package.__path__, package.__name__ + ".")]
heavy = {}
for name in names:
    importlib.import_module(name)
    heavy |= {h: name for h in ("torch", "vllm", "transformers") if h in sys.modules and h not in heavy}
importlib.import_module("flexquant.cli.policy")
importlib.import_module("flexquant.policy.rules").load_policy("phase-batch")
heavy |= {h: "a policy" for h in {"torch", "vllm", "transformers"} & set(sys.modules) - set(heavy)}
print(json.dumps([len(names), heavy]))
"""


@pytest.mark.parametrize("package", ["checkpoint", "policy", "documents"])
def test_no_module_imports_torch_or_vllm(package):
    command = [sys.executable, "-c", IMPORT_ALL, f"flexquant.{package}"]
    modules, heavy = json.loads(programs.run(command, timeout=120).stdout)
    assert modules > 2
    assert heavy == {}, "the first module that loads each"
