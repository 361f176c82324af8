# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Layers that keep a state, in CUDA graphs: one variant goes on from what another has written."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import ON_GPU, RUNNERS, graph_engine
from tests.gpu.test_graph_modes import BATCHES
from tests.gpu.test_policy_change import add, change, step
from tests.integration.conftest import answers, records_of
from tests.policies import rules
from tests.states import make_variants, merge_twins

MODES = ["PIECEWISE", "FULL_AND_PIECEWISE"]
BY_BATCH = rules("- {when: {phase: decode, batch_size: {max: 4}}, use: second}", "- use: first")
OPPOSITE = rules("- {when: {phase: decode, batch_size: {max: 4}}, use: first}", "- use: second")
pytestmark = [] if ON_GPU else pytest.mark.full


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = make_variants(tmp_path_factory.mktemp("states"), "qwen3_next")
    merge_twins(made)
    return made


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("runner", RUNNERS)
def test_graphs_of_two_variants_share_a_state(runner, mode, folder, tmp_path):
    trace = tmp_path / "trace.jsonl"

    def generate(checkpoint, policy=None, **options):
        with graph_engine(folder / checkpoint, runner, mode, policy, **options) as llm:
            return [answers(llm, batch, max_tokens=8, ignore_eos=True) for batch in BATCHES]

    found = generate("twins", BY_BATCH, flexquant={"trace": str(trace)})
    assert found == generate("w8a8")
    passes = records_of(trace)[1:]
    assert {(p["phase"] == "decode" and p["sequences"] <= 4, p["plan"]) for p in passes} == {
        (True, "second"),
        (False, "first"),
    }


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_capture_on_the_way_leaves_the_states_of_requests_alone(runner, folder):
    def generate(checkpoint, policy=None, changes=False):
        with graph_engine(folder / checkpoint, runner, "FULL_AND_PIECEWISE", policy) as llm:
            add(llm, 3, 16)
            step(llm, 5)
            if changes:
                assert change(llm, "opposite", OPPOSITE)["captures_graphs"]
            return {output.request_id: list(output.outputs[0].token_ids) for output in step(llm)}

    assert generate("twins", BY_BATCH, changes=True) == generate("w8a8")
