# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A public class, type or function at module level has a name that no other file gives to another one."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("flexquant", "merge")
INTERFACE = {"main", "configure", "run"}
"""The names by which programs are started, and by which the command line finds its subcommands."""


def _names(file: Path) -> Iterator[str]:
    """Yield the public names of classes and functions, and of types, which alone are written like classes."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]) if name[0].isupper() and not name.isupper():
                yield name


def test_no_two_files_give_one_name_to_different_things():
    files = defaultdict(list)
    for package in PACKAGES:
        for file in sorted((REPOSITORY / package).rglob("*.py")):
            for name in _names(file):
                if not name.startswith("_") and name not in INTERFACE:
                    files[name].append(str(file.relative_to(REPOSITORY)))
    assert files, "no file was read"
    shared = {name: places for name, places in files.items() if len(places) > 1}
    assert not shared, "give each a name for what it holds"
