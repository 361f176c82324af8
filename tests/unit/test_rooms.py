# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The rooms of the package are those that flexquant/README.md names, and import each other as it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

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


def room_of(module: str) -> str:
    return module.partition(".")[0]


def imports(file: Path) -> set[str]:
    """Return the rooms of the FlexQuant modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "flexquant":
            names = [f"flexquant.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            if name.split(".")[0] == "flexquant":
                room = room_of(name.partition(".")[2])
                found.add("" if room.startswith("__") else room)
    return found


def found() -> dict[str, set[str]]:
    rooms: dict[str, set[str]] = {}
    for module, file in modules().items():
        room = room_of(module)
        if room not in ENTRANCES:
            rooms.setdefault(room, set()).update(imports(file) - EVERYBODYS - {room})
    return rooms


def test_the_rooms_are_those_of_the_table() -> None:
    assert set(documented()) == set(found())


def test_they_import_each_other_as_the_table_says() -> None:
    assert found() == documented()


def test_there_is_no_circle_since_each_imports_rooms_above_it() -> None:
    above: set[str] = set()
    for room, imported in documented().items():
        assert imported <= above, f"{room} imports a room that stands below it"
        above.add(room)


def test_the_entrances_import_lazily_what_they_open() -> None:
    """``flexquant/__init__.py`` runs in every vLLM process: it must import nothing before it is needed."""
    tree = ast.parse((ROOT / "flexquant" / "__init__.py").read_text())
    at_the_top = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert not {name for name in at_the_top if name and name.startswith("flexquant")}


def test_every_file_that_the_page_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8"))
    missing = [link for link in links if not (README.parent / link).exists()]
    assert links and not missing
