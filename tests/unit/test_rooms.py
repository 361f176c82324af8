# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The rooms of the package are those that flexquant/README.md names, and import each other as it says."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

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
    return {
        room: {name.strip() for name in names.split(",") if name.strip()}
        for room, names in rows
        if room != "room"
    }


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
