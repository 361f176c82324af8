# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Digests, tables and figures of results, as several rooms write them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from flexquant.errors import FlexQuantError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def digest_of(document: object, sort_keys: bool = True) -> str:
    """Return the SHA-256 of JSON-able data, in hexadecimal; unsorted, the order of keys counts too."""
    return hashlib.sha256(json.dumps(document, sort_keys=sort_keys).encode()).hexdigest()


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file of any size, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def different_keys(wanted: Mapping[str, object], found: Mapping[str, object]) -> list[str]:
    """Return the keys that have other values in ``found``, or are missing in one of the two."""
    return [key for key in {**wanted, **found} if wanted.get(key) != found.get(key)]


def align_cells(rows: Sequence[Sequence[str]], numbers: Container[int] = ()) -> list[list[str]]:
    """Return rows with cells as wide as their column, columns ``numbers`` to the right; rows may be short."""
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    forms = [f"{'>' if i in numbers else '<'}{width}" for i, width in enumerate(widths)]
    return [[format(cell, form) for cell, form in zip(row, forms, strict=False)] for row in rows]


def table_lines(rows: Sequence[Sequence[str]], numbers: Container[int] = ()) -> list[str]:
    """Return a line for each row, with two spaces between columns that are aligned by :func:`align_cells`."""
    return ["  ".join(row).rstrip() for row in align_cells(rows, numbers)]


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, sizes in inches; raise FlexQuantError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise FlexQuantError('plots need matplotlib; install it with: pip install "flexquant[eval]"') from e
    return Figure(figsize=(width, height), layout="constrained")
