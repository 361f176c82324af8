# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Pairs as publishers ship them are merged, or refused with the reason that the page gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.publishers.outcomes import MERGED, PAGE, outcome_of, page, row
from tests.publishers.shapes import SHAPES, Shape


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_pair_becomes_what_the_page_says(shape: Shape, tmp_path: Path) -> None:
    outcome = outcome_of(shape, tmp_path)
    assert row(shape, outcome) in PAGE.read_text(encoding="utf-8").splitlines()


def test_the_page_counts_its_rows() -> None:
    written = PAGE.read_text(encoding="utf-8")
    rows = {shape.name: written.partition(f"| {shape.name} | ")[2].partition(" |\n")[0] for shape in SHAPES}
    assert written == page(rows)
    assert len(rows) == len(SHAPES) >= 30 and list(rows.values()).count(MERGED) >= 30
    assert f"tells of {len(SHAPES)} pairs" in PAGE.with_name("README.md").read_text(encoding="utf-8")
