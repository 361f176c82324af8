# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The wheel holds the packages with their data, what they import is declared, and the Dockerfile is sound."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests import programs
from tests.imports import imports

PROJECT = tomllib.loads((programs.ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {"yaml": "pyyaml"}
EXTRAS_OF_FOLDERS = {"quantization": ["quantize"], "serving": ["gpu", "cpu"]}
EXTRAS_OF_FILES = {"documents/texts.py": ["quantize"], "cli/quantize.py": ["quantize"]}
ENGINE_AND_PLOTS = ["gpu", "eval"]
"""Extras of all other files, whose functions import them: commands that start engines or draw plots."""


def declared(extras: list[str]) -> set[str]:
    optional = PROJECT["optional-dependencies"]
    requirements = [*PROJECT["dependencies"], *(r for extra in extras for r in optional[extra])]
    return {re.match(r"[\w.-]+", r)[0].lower().replace("_", "-") for r in requirements}


def imported(file: Path) -> set[str]:
    """Return the distributions that a file imports, at its top or inside of functions."""
    tops = {module.split(".")[0] for module, _ in imports(file.read_text(encoding="utf-8"))}
    others = tops - sys.stdlib_module_names - {"flexquant"}
    return {DISTRIBUTIONS.get(top, top).replace("_", "-") for top in others}


@pytest.mark.parametrize("folder", ["flexquant", "merge", "policies"])
def test_every_import_is_declared(folder):
    files = list((programs.ROOT / folder).rglob("*.py"))
    assert files
    missing = {}
    for file in files:
        place = file.relative_to(programs.ROOT / folder)
        extras = EXTRAS_OF_FILES.get(str(place)) or EXTRAS_OF_FOLDERS.get(place.parts[0], ENGINE_AND_PLOTS)
        if unknown := sorted(imported(file) - declared(extras)):
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
print(json.dumps([len(names), heavy]))
"""


@pytest.mark.parametrize("package", ["checkpoint", "policy", "documents"])
def test_no_module_imports_torch_or_vllm(package):
    command = [sys.executable, "-c", IMPORT_ALL, f"flexquant.{package}"]
    modules, heavy = json.loads(programs.run(command, timeout=120).stdout)
    assert modules > 2
    assert heavy == {}, "the first module that loads each"


def test_wheel_contents(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path)]
    programs.run([*command, programs.ROOT], timeout=300, folder=tmp_path)
    (wheel,) = tmp_path.glob("flexquant-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    for folder in ("flexquant", "flexquant/merge", "flexquant/policies"):
        kinds = ("*.py", "*.yaml", "*.txt", "*.cpp", "*.html")
        files = [file for kind in kinds for file in (programs.ROOT / folder).rglob(kind)]
        assert len(files) > 3 and {str(file.relative_to(programs.ROOT)) for file in files} <= names
    assert not [n for n in names if n.startswith(("tests", "benchmarks", "examples", "merge/"))]
    assert "[vllm.general_plugins]\nflexquant = flexquant:register" in entry_points
    assert "[console_scripts]\nflexquant = flexquant.cli:main" in entry_points


DOCKERFILE = programs.ROOT / "examples" / "deploy" / "Dockerfile"


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("hadolint"), reason="`make test-full` installs hadolint")
def test_hadolint_finds_nothing_wrong() -> None:
    programs.run(["hadolint", "--failure-threshold", "style", DOCKERFILE], timeout=120)


def test_both_images_serve_the_routes() -> None:
    assert DOCKERFILE.read_text().count("ENV VLLM_PLUGINS=flexquant") == 2
