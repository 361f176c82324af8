# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Two tensor-parallel ranks: each finds the same routes by itself; a pure plan is the static checkpoint."""

from __future__ import annotations

import pytest

from tests.checkpoints import EXPERTS, MIXTURES
from tests.integration.logprobs import distance
from tests.integration.two_ranks import (
    check_policy_change,
    needs_two_cores,
    run,
    run_several,
)
from tests.states import make_variants, merge_twins

pytestmark = needs_two_cores
RANKS = {"tensor_parallel_size": 2}


@pytest.fixture(
    scope="module",
    params=[
        "llama",
        pytest.param("qwen2", marks=pytest.mark.full),
        pytest.param("qwen3_moe", marks=pytest.mark.full),
    ],
)
def folder(request, tiny_merged):
    """Return a folder with both variants and the merged checkpoint."""
    return tiny_merged(request.param, 2, (EXPERTS,) if request.param in MIXTURES else ())


@pytest.fixture(scope="module")
def several(folder, tmp_path_factory):
    return run_several(folder / "merged", RANKS, tmp_path_factory.mktemp("several"))


def test_both_ranks_take_the_policys_routes(several):
    several.check_routes()


@pytest.mark.parametrize(("variant", "number"), [("w4a16", 1), ("w8a8", 3)])
def test_pure_plans_equal_the_static_checkpoints(variant, number, folder, several):
    static = run(folder / variant, RANKS)
    assert several.answers[number] == static[number]
    assert several.answers[2] != static[2], "which the layered plan answered"


def test_both_ranks_take_another_policy_between_the_same_two_passes(tiny_merged, tmp_path):
    check_policy_change(tiny_merged("llama", num_layers=2) / "merged", RANKS, tmp_path)


def test_each_rank_computes_int8_weights_from_its_part_of_one_copy(tiny_merged):
    """Each rank rounds its own part of a row, so that the answers are near to one rank's, not equal."""
    published = tiny_merged("llama", num_layers=2) / "w4a16"
    on_two = run(published, RANKS, "w8a8-from-int4")
    on_one = run(published, {"tensor_parallel_size": 1}, "w8a8-from-int4")
    in_int4 = run(published, RANKS, "w4a16")
    for number, answers in on_two.items():
        assert distance(answers, on_one[number]) < 0.06
        assert distance(answers, in_int4[number]) > 0.005


@pytest.mark.full
def test_a_variant_goes_on_from_the_state_that_another_wrote(tmp_path):
    """Each rank has its part of the state."""
    merged = merge_twins(make_variants(tmp_path, "qwen3_next"))
    assert run(merged, RANKS) == run(tmp_path / "w8a8", RANKS)
