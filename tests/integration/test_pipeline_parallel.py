# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Pipeline-parallel ranks: each holds half of the layers of every variant, and takes the same routes."""

import pytest

from flexquant.merge import merge_checkpoints
from tests.checkpoints import EXPERTS
from tests.integration.conftest import assert_alike, engine
from tests.integration.test_compile import SEVERAL, SIZES, answers_by_number
from tests.integration.two_ranks import CORES, needs_two_cores, run, run_several
from tests.policies import rules
from tests.rotations import make_rotated
from tests.states import make_variants, merge_twins

pytestmark = [*needs_two_cores, pytest.mark.full]
RANKS = {"pipeline_parallel_size": 2}
TWO_AND_TWO = ["linear_attention", "full_attention"] * 2


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3_moe"])
def folder(request, tiny_merged):
    """Equal experts are held once, as embedding and lm_head are, but in layers that only one rank has."""
    return tiny_merged(request.param, 2, (EXPERTS,))


@pytest.fixture(scope="module")
def several(folder, tmp_path_factory):
    return run_several(folder / "merged", RANKS, tmp_path_factory.mktemp("several"))


def test_both_ranks_take_the_policys_routes(several):
    """The layered plan has its INT8 layer on the first rank, and its INT4 layer on the second."""
    several.check_routes()


def assert_equal_to_one_rank(answers, merged, policy, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", str(CORES[0]))
    with engine(merged, policy, **SIZES) as llm:
        for number, expected in answers_by_number(llm).items():
            assert_alike(answers[number], expected)


def test_answers_equal_those_of_one_rank(folder, several, monkeypatch):
    assert_equal_to_one_rank(several.answers, folder / "merged", SEVERAL, monkeypatch)


def test_each_rank_holds_its_own_layers_of_every_variant(several):
    first, second = several.header
    for variant in ("w8a8", "w4a16"):
        assert 0 < first["weight_bytes"][variant] == second["weight_bytes"][variant]


def test_a_variant_of_which_a_rank_has_no_layer(tiny_merged, tmp_path, monkeypatch):
    """The layer in INT8, one of two, is on the second rank."""
    merged, policy = (
        tiny_merged(num_layers=2) / "merged",
        rules('- use: {default: w4a16, layers: {"1": w8a8}}'),
    )
    found = run_several(merged, RANKS, tmp_path, policy=policy)
    first, second = (header["weight_bytes"] for header in found.header)
    assert first["w8a8"] == 0 < second["w8a8"]
    assert second["w4a16"] == 0 < first["w4a16"]
    assert_equal_to_one_rank(found.answers, merged, policy, monkeypatch)


def test_inputs_are_rotated_by_a_matrix_that_lies_under_another_ranks_layer(tmp_path, monkeypatch):
    """The checkpoint has it under layer 0 alone, which is on the first rank."""
    sources = {scheme: make_rotated(tmp_path / scheme, scheme) for scheme in ("w8a8", "w4a16")}
    merge_checkpoints(sources, tmp_path / "merged")
    found = run_several(tmp_path / "merged", RANKS, tmp_path)
    assert_equal_to_one_rank(found.answers, tmp_path / "merged", SEVERAL, monkeypatch)


def test_with_tensor_parallel_ranks_too(folder, tmp_path):
    """Four ranks share two cores. Each quantises its part of the activations, so the answers differ."""
    run_several(folder / "merged", RANKS | {"tensor_parallel_size": 2}, tmp_path).check_routes()


def test_a_variant_goes_on_from_the_state_that_another_wrote(tmp_path):
    """Each rank has a state, and attention, without which vLLM's ranks do not agree on the cache's layout."""
    merged = merge_twins(make_variants(tmp_path, "qwen3_next", layer_types=TWO_AND_TWO))
    assert run(merged, RANKS) == run(tmp_path / "w8a8", RANKS)
