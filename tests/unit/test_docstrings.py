# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Docstrings, attribute docstrings too, do not begin as fragments do: with Of, By, Those or That."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("flexquant", "merge", "benchmarks", "examples", "tests")
FRAGMENTS = {"Of", "By", "Those", "That"}


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every string that is a statement by itself."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                yield node.lineno, text


def fragments(source: str) -> list[tuple[int, str]]:
    """Return the line and the text of every docstring that begins with one of FRAGMENTS."""
    return [(line, text) for line, text in docstrings(source) if FRAGMENTS & {*text.split(maxsplit=1)[:1]}]


def test_a_fragment_is_found_wherever_a_docstring_stands():
    source = '"""Of a module."""\nclass A:\n    """By class."""\n    b: int\n    """Those of b."""\n'
    source += '    def c(self):\n        """That of c."""\n        self.d = 1\n        """Offset of d."""\n'
    assert [line for line, _ in fragments(source)] == [1, 3, 5, 7]


def test_no_docstring_begins_like_a_fragment():
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 100
    found = [
        f"{file.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for file in files
        for line, text in fragments(file.read_text(encoding="utf-8"))
    ]
    assert not found, "write who does what, or what the value is:\n" + "\n".join(found)
