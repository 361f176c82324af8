# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What every benchmark shares: where a result comes from, how it is written, and Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.speed.results import ROOT, git_commit
from flexquant.evaluation.engine import describe_command, describe_machine, describe_versions

RESULTS = ROOT / "benchmarks/results"
RECORD = 3000
"""Most characters of a record that is written on one line."""


def origin(module: str) -> dict[str, Any]:
    """Return the command line of ``python -m module``, and its commit, machine and versions."""
    return {
        "argv": ["python", "-m", module, *describe_command()[1:]],
        "commit": git_commit(),
        "machine": describe_machine(),
        "versions": describe_versions(),
    }


def read_result(name: str) -> dict[str, Any]:
    """Return a committed result by its name in RESULTS."""
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def model_name(folder: str) -> str:
    """Return the name of a checkpoint's folder; of a synthetic model's, that of the folder around it."""
    path = Path(folder)
    return path.parent.name if path.name.startswith("merged-") else path.name


def write_result(file: Path, document: Any) -> None:
    """Write a document as JSON with a record a line."""
    file.write_text(_lines(document) + "\n", encoding="utf-8")


def _lines(value: Any, indent: int = 0) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if _depth(value) < 2 or (_depth(value) == 2 and len(text) <= RECORD):
        return text
    parts = [_lines(part, indent + 1) for part in (value.values() if isinstance(value, dict) else value)]
    begin, end = "[", "]"
    if isinstance(value, dict):
        begin, end = "{", "}"
        names = (json.dumps(name, ensure_ascii=False) for name in value)
        parts = [f"{name}: {part}" for name, part in zip(names, parts, strict=True)]
    separator = "\n" + " " * (indent + 1)
    return begin + separator + f",{separator}".join(parts) + "\n" + " " * indent + end


def _depth(value: Any) -> int:
    """Return how many lists and objects lie one within another."""
    if not isinstance(value, dict | list) or not value:
        return 0
    return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value))


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; every row has as many cells as the header."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
