# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Rooms import each other as flexquant/README.md says; the wheel holds all; what it imports is declared."""

import ast
import json
import re
import shutil
import sys
import tomllib
import zipfile
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests import programs
from tests.imports import imports

ROOT = Path(__file__).parents[2]
README = ROOT / "flexquant" / "README.md"
EVERYBODYS = {"", "errors"}
"""Rooms that every room may import: ``flexquant/__init__.py`` with the version, and the errors."""
ENTRANCES = {"", "__main__", "errors", "vllm_cpu"}
"""Files that are no room: the entry points, and the errors."""


def documented() -> dict[str, set[str]]:
    """Return room -> the rooms that it imports, in the order of the table."""
    rows = re.findall(r"^\| (\w+) \| .* \|([\w, ]*)\|$", README.read_text(encoding="utf-8"), re.MULTILINE)
    split = {room: map(str.strip, names.split(",")) for room, names in rows if room != "room"}
    return {room: {name for name in names if name} for room, names in split.items()}


def modules() -> dict[str, Path]:
    """Return every module of the package, keyed by its dotted name without ``flexquant``."""
    found = {}
    for folder, package in ((ROOT / "flexquant", ""), (ROOT / "merge", "merge.")):
        for file in folder.rglob("*.py"):
            name = package + ".".join(file.relative_to(folder).with_suffix("").parts)
            found[name.removesuffix("__init__").rstrip(".")] = file
    return found


def imported_by(file: Path) -> set[str]:
    """Return the FlexQuant modules, without ``flexquant.``, that a file imports anywhere in it."""
    found = imports(file.read_text(encoding="utf-8"))
    names = {name for module, inner in found for name in (module, f"{module}.{inner}")}
    return {name.partition(".")[2] for name in names if name.split(".")[0] == "flexquant"}


def test_the_rooms_import_each_other_as_the_table_says_and_only_those_above() -> None:
    rooms: dict[str, set[str]] = {}
    for module, file in modules().items():
        room = module.split(".")[0]
        if room not in ENTRANCES:
            imported = {name.split(".")[0] for name in imported_by(file) if not name.startswith("__")}
            rooms.setdefault(room, set()).update(imported - EVERYBODYS - {room})
    assert rooms == documented()
    above: set[str] = set()
    for room, imported in documented().items():
        assert imported <= above, f"{room} imports a room that stands below it"
        above.add(room)


def test_no_file_imports_one_that_imports_it() -> None:
    """Not even inside a function or for types; but ``flexquant/__init__.py`` opens the plugin lazily."""
    files = {module: file for module, file in modules().items() if module}
    graph = {module: (imported_by(file) & files.keys()) - {module} for module, file in files.items()}
    list(TopologicalSorter(graph).static_order())


def test_the_front_end_and_the_workers_do_not_import_each_other() -> None:
    """They run in different processes."""
    for side, other in (("frontend", "worker"), ("worker", "frontend"), ("kernels", "frontend")):
        files = {module: file for module, file in modules().items() if module.startswith(f"serving.{side}.")}
        assert files
        for module, file in files.items():
            assert not [n for n in imported_by(file) if n.startswith(f"serving.{other}")], module


def test_the_entrances_import_lazily_what_they_open() -> None:
    """``flexquant/__init__.py`` runs in every vLLM process: it must import nothing before it is needed."""
    tree = ast.parse((ROOT / "flexquant" / "__init__.py").read_text())
    at_the_top = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert not {name for name in at_the_top if name and name.startswith("flexquant")}


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
