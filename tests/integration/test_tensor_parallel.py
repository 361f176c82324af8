# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Two tensor-parallel ranks: each finds the same routes by itself; a pure plan is the static checkpoint."""

from __future__ import annotations

import pytest

from tests.checkpoints import EXPERTS, MIXTURES
from tests.integration.two_ranks import (
    check_policy_change,
    check_trigger,
    needs_two_cores,
    run,
    run_several,
)

pytestmark = needs_two_cores
RANKS = {"tensor_parallel_size": 2}


EXPERT_PARALLEL = {**RANKS, "enable_expert_parallel": True}
FULL = pytest.mark.full


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("llama", RANKS), id="llama"),
        pytest.param(("qwen2", RANKS), id="qwen2", marks=FULL),
        pytest.param(("qwen3_moe", RANKS), id="qwen3_moe", marks=FULL),
        pytest.param(("qwen3_moe", EXPERT_PARALLEL), id="qwen3_moe, expert parallel", marks=FULL),
    ],
)
def served(request, tiny_merged):
    """A folder with both variants and the merged checkpoint, and vLLM's options for the ranks."""
    architecture, ranks = request.param
    return tiny_merged(architecture, 2, (EXPERTS,) if architecture in MIXTURES else ()), ranks


@pytest.fixture(scope="module")
def several(served, tmp_path_factory):
    folder, ranks = served
    return run_several(folder / "merged", ranks, tmp_path_factory.mktemp("several"))


def test_both_ranks_take_the_policys_routes(several):
    several.check_routes()


@pytest.mark.parametrize(("variant", "number"), [("w4a16", 1), ("w8a8", 3)])
def test_pure_plans_equal_the_static_checkpoints(variant, number, served, several):
    folder, ranks = served
    static = run(folder / variant, ranks)
    assert several.answers[number] == static[number]
    assert several.answers[2] != static[2], "which the layered plan answered"


def test_both_ranks_take_another_policy_between_the_same_two_passes(tiny_merged, tmp_path):
    check_policy_change(tiny_merged("llama", num_layers=2) / "merged", RANKS, tmp_path)


def test_both_ranks_find_the_same_passes_unsure(tiny_merged, tmp_path):
    check_trigger(tiny_merged("llama", num_layers=2) / "merged", RANKS, tmp_path)
