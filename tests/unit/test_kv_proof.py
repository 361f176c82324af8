# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What changes the cache is refused, folded norms are not; the pages say what the committed results do."""

import json
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.architectures import kv_proof, outcomes
from tests.architectures.kv_proof import FOLD, Cell, cells, compared
from tests.architectures.outcomes import FAILS, NOT_MADE, SERVED, STOCK_FAILS
from tests.conftest import rest_full
from tests.publishers.outcomes import MERGED, NOT_SERVED, PAGE, SERVED_APART, outcome_of, page, read_page, row
from tests.publishers.shapes import SHAPES, Shape
from tests.stock import one_rank, refusal_of_stock

FOUND = json.loads(outcomes.RESULTS.read_text(encoding="utf-8"))
FAMILIES = (
    "ApertusForCausalLM",  # the norm before attention has a name of its own
    "DeepseekV3ForCausalLM",  # latents, a router with a bias
    "Gemma3ForCausalLM",  # norms that add one, behind attention too
    "Gemma4ForCausalLM",  # a layer's experts in one tensor, which a folded norm is before
    "HunYuanDenseV1ForCausalLM",  # the norms of Q and K have names of their own
    "Qwen3NextForCausalLM",  # a state
    "StableLmForCausalLM",  # norms with biases, and one for each head
    "Starcoder2ForCausalLM",  # biases everywhere
)
REFUSED = [*NOT_SERVED, *(name for names in SERVED_APART.values() for name in names)]
"""Published pairs that do not merge."""


@pytest.mark.parametrize("architecture", rest_full(compared(), *FAMILIES))
def test_what_changes_the_cache_is_refused_and_folded_norms_are_not(architecture, tmp_path):
    found = list(cells(architecture, tmp_path))
    assert any(cell.change > 0.1 for cell in found), "nothing changes the cache"
    assert any(cell.parameter == FOLD for cell in found) or architecture not in FAMILIES
    assert [cell for cell in found if not cell.is_right] == []


def test_the_page_is_of_the_results_and_the_results_are_of_all_that_is_compared():
    """If it fails, run python -m tests.architectures.kv_proof with the names that are missing."""
    results = json.loads(kv_proof.RESULTS.read_text(encoding="utf-8"))
    assert kv_proof.PAGE.read_text(encoding="utf-8") == kv_proof.page(results)
    assert results["architectures"].keys() == {*compared()}
    assert all(Cell(**cell).is_right for found in results["architectures"].values() for cell in found)


def test_the_page_of_architectures_is_what_the_results_say():
    """If it fails, run python -m tests.architectures, which tries the architectures that are missing."""
    assert outcomes.PAGE.read_text(encoding="utf-8") == outcomes.page(FOUND)


def test_all_were_tried_and_every_end_but_served_has_a_reason():
    found = FOUND["architectures"].values()
    assert len(found) == FOUND["text_models"]
    assert not [one["architecture"] for one in found if one["outcome"] == FAILS]
    assert not [one["architecture"] for one in found if one["outcome"] != SERVED and not one["reason"]]


def test_readme_has_the_numbers_of_the_results():
    ends = [one["outcome"] for one in FOUND["architectures"].values()]
    page = " ".join((outcomes.ROOT / "README.md").read_text().split())
    said = re.search(
        r"(\d+) text models, .* (\d+) answer .* (\d+) are .* (\d+) fail .* (\d+) could not", page
    )
    assert said is not None
    counts = (ends.count(outcome) for outcome in (SERVED, "refused", STOCK_FAILS, NOT_MADE))
    assert [int(number) for number in said.groups()] == [len(ends), *counts]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_pair_becomes_what_the_page_says(shape: Shape, tmp_path: Path) -> None:
    assert row(shape, outcome_of(shape, tmp_path)) in PAGE.read_text(encoding="utf-8").splitlines()


def test_the_page_counts_its_rows() -> None:
    written = PAGE.read_text(encoding="utf-8")
    rows = read_page()
    assert written == page(rows)
    assert len(rows) == len(SHAPES) >= 30 and list(rows.values()).count(MERGED) >= 30
    assert {name for name, outcome in rows.items() if outcome != MERGED} == {*REFUSED}
    assert f"tells of {len(SHAPES)} pairs" in PAGE.with_name("README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_rank(tmp_path_factory.mktemp("ranks")):
        yield


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
