# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Mixtures of experts, layers that keep a state, and images, in CUDA graphs: answers are stock vLLM's."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from flexquant.merge import merge_checkpoints
from tests.checkpoints import EXPERTS
from tests.conftest import rest_full
from tests.gpu.conftest import ON_GPU, RUNNERS, generate, graph_engine
from tests.gpu.test_graph_modes import BATCHES
from tests.gpu.test_plans_in_graphs import BY_BATCH
from tests.gpu.test_replays import add, change, step
from tests.integration.conftest import records_of, tiny_merged  # noqa: F401 - a fixture
from tests.policies import rules
from tests.states import make_variants, merge_twins
from tests.vision import KINDS, make_vision_checkpoint, prompts

pytestmark = [] if ON_GPU else pytest.mark.full

MODES = ["PIECEWISE", "FULL_AND_PIECEWISE"]
TWINS = rules("- {when: {phase: decode, batch_size: {max: 4}}, use: second}", "- use: first")
OPPOSITE = rules("- {when: {phase: decode, batch_size: {max: 4}}, use: first}", "- use: second")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("runner", RUNNERS)
def test_plans_of_a_mixture(runner, mode, tiny_merged, tmp_path):  # noqa: F811
    """Its variants are the static checkpoints, and its passes the policy's."""
    folder, trace = tiny_merged("qwen3_moe", 2, (EXPERTS,)), tmp_path / "trace.jsonl"

    def serve(model: str, policy: str | None = None, **options: Any) -> list[Any]:
        return generate(folder / model, runner, mode, policy, *BATCHES, tokens=8, **options)

    w8a8, w4a16 = (serve("merged", rules(f"- use: {name}")) for name in ("w8a8", "w4a16"))
    assert [w8a8, w4a16] == [serve("w8a8"), serve("w4a16")]
    by_batch = serve("merged", BY_BATCH, flexquant={"trace": str(trace)})
    plans = {(p["phase"], p["sequences"]): p["plan"] for p in records_of(trace)[1:]}
    assert [plans["decode", number] for number in (1, 3, 20)] == ["w4a16"] * 3
    assert plans["prefill", 1] == "w8a8"
    assert by_batch[0] not in (w8a8[0], w4a16[0])


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """Return a folder with w8a8 of a model whose layers keep a state, and twins, both of its weights."""
    made = make_variants(tmp_path_factory.mktemp("states"), "qwen3_next")
    merge_twins(made)
    return made


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("runner", RUNNERS)
def test_graphs_of_two_variants_share_a_state(runner, mode, states, tmp_path):
    """One variant goes on from what another has written."""
    options = {"flexquant": {"trace": str(trace := tmp_path / "trace.jsonl")}}
    found = generate(states / "twins", runner, mode, TWINS, *BATCHES, tokens=8, **options)
    assert found == generate(states / "w8a8", runner, mode, None, *BATCHES, tokens=8)
    passes = records_of(trace)[1:]
    taken = {(p["phase"] == "decode" and p["sequences"] <= 4, p["plan"]) for p in passes}
    assert taken == {(True, "second"), (False, "first")}


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_capture_on_the_way_leaves_the_states_of_requests_alone(runner, states):
    def finish(checkpoint, policy=None, changes=False):
        with graph_engine(states / checkpoint, runner, "FULL_AND_PIECEWISE", policy) as llm:
            add(llm, 3, 16)
            step(llm, 5)
            if changes:
                assert change(llm, "opposite", OPPOSITE)["captures_graphs"]
            return {output.request_id: list(output.outputs[0].token_ids) for output in step(llm)}

    assert finish("twins", TWINS, changes=True) == finish("w8a8")


WITH_TORCHVISION = ("qwen2_5_vl", "qwen3_5", "qwen3_vl") if find_spec("torchvision") is not None else ()


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("kind", rest_full(("idefics3", *WITH_TORCHVISION), "idefics3"))
def test_a_constant_policy_equals_stock_vllm(kind: str, runner: str, tmp_path: Path) -> None:
    if kind == "qwen3_5" and runner == "V2" and not ON_GPU:
        pytest.skip("stock vLLM computes NaN for it in Triton's interpreter")
    sources = {v: make_vision_checkpoint(tmp_path / v, v, KINDS[kind]) for v in ("w8a8", "w4a16")}
    merge_checkpoints(sources, tmp_path / "merged")
    stock, merged = (
        generate(folder, runner, "FULL_AND_PIECEWISE", policy, prompts(KINDS[kind]), tokens=8)
        for folder, policy in ((sources["w4a16"], None), (tmp_path / "merged", "w4a16"))
    )
    assert merged == stock
