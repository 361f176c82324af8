# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Lay out tables of text for terminals."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import zip_longest


def align_cells(rows: Sequence[Sequence[str]], numbers: Container[int] = ()) -> list[list[str]]:
    """Return the rows with each cell as wide as its column; the columns ``numbers`` are aligned at the right.

    A row may lack cells at its end.
    """
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    return [
        [f"{cell:{'>' if i in numbers else '<'}{widths[i]}}" for i, cell in enumerate(row)] for row in rows
    ]


def table_lines(rows: Sequence[Sequence[str]], numbers: Container[int] = ()) -> list[str]:
    """Return a line for each row, with two spaces between columns that are aligned by :func:`align_cells`."""
    return ["  ".join(row).rstrip() for row in align_cells(rows, numbers)]
