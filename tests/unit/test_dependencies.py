# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What the package imports is declared, so that no other package's requirements have to bring it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {"yaml": "pyyaml"}
EXTRAS_OF_FOLDERS = {"quantization": ["quantize"], "serving": ["gpu", "cpu"]}
EXTRAS_OF_FILES = {"documents/texts.py": ["quantize"], "cli/quantize.py": ["quantize"]}
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
