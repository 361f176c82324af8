# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Pairs as publishers ship them are merged, or refused with the reason that the page gives."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.publishers.outcomes import MERGED, NOT_SERVED, PAGE, SERVED_APART, outcome_of, page, read_page, row
from tests.publishers.shapes import SHAPES, Shape
from tests.stock import one_rank, refusal_of_stock


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_pair_becomes_what_the_page_says(shape: Shape, tmp_path: Path) -> None:
    outcome = outcome_of(shape, tmp_path)
    assert row(shape, outcome) in PAGE.read_text(encoding="utf-8").splitlines()


def test_the_page_counts_its_rows() -> None:
    written = PAGE.read_text(encoding="utf-8")
    rows = read_page()
    assert written == page(rows)
    assert len(rows) == len(SHAPES) >= 30 and list(rows.values()).count(MERGED) >= 30
    refused = {name for name, outcome in rows.items() if outcome != MERGED}
    assert refused == {*NOT_SERVED, *(name for names in SERVED_APART.values() for name in names)}
    assert f"tells of {len(SHAPES)} pairs" in PAGE.with_name("README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_rank(tmp_path_factory.mktemp("ranks")):
        yield


REFUSED = [*NOT_SERVED, *(name for names in SERVED_APART.values() for name in names)]


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize("name", REFUSED)
def test_stock_vllm_loads_what_the_page_says(name: str, tmp_path: Path) -> None:
    (shape,) = (shape for shape in SHAPES if shape.name == name)
    answers = [refusal_of_stock(folder) for folder in shape.write(tmp_path).values()]
    refusals = [answer for answer in answers if answer is not None]
    if name in NOT_SERVED:
        (refusal,) = refusals
        assert NOT_SERVED[name] in refusal
    else:
        assert refusals == []
    release = ".".join(version("vllm").split(".")[:2])
    assert f"Stock vLLM {release} loads" in PAGE.read_text(encoding="utf-8")
