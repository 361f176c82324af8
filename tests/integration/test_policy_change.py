# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Another policy on an eager engine: what it may use, and that answers are those of its plans.

A live server is asked in test_live_server, and engines with CUDA graphs in tests/gpu/test_replays.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from flexquant.merge import merge_checkpoints
from tests.integration.conftest import Answers, answers, change, engine, generate, read_policy, records_of
from tests.policies import LAYERED_DECODE, rules

pytestmark = pytest.mark.engine
PROMPTS = ["a prompt of some words", "another one"]
LAST_IN_INT4 = rules('- use: {default: w8a8, layers: {"-1": w4a16}}')
DERIVE = "derive: {w4a8: {from: w4a16, activations: int8}}\n"
IN_INT4 = "- {when: {phase: decode}, use: w4a16}"
W4A8 = DERIVE + rules(IN_INT4, "- use: w4a8")
UNREACHABLE = DERIVE + rules(IN_INT4, "- {when: {tokens: {min: 1000000}}, use: w4a8}", "- use: w8a8")
"""A policy whose derived variant is for passes larger than any."""
OTHER_SOURCE = W4A8.replace("from: w4a16", "from: other").replace("use: w4a16", "use: other")


def served(llm: Any) -> str:
    (status,) = llm.collective_rpc("flexquant_status")
    return status["policy"]["name"]


def document(policy: str) -> Any:
    """Return a built-in policy, or one given as text, as it is posted."""
    return read_policy(policy).document


def test_variants_that_were_not_loaded_are_refused_with_what_is_there(tiny_merged):
    with engine(tiny_merged() / "merged", "w8a8") as llm:
        before = llm.collective_rpc("flexquant_status")
        refused = change(llm, "phase", document("phase"))["refused"]
        assert "phase uses w4a16, but the server has loaded w8a8; take a policy" in refused
        assert "deep: rules is []" in change(llm, "deep", document("w8a8") | {"rules": []})["refused"]
        assert llm.collective_rpc("flexquant_status") == before


def test_derived_variants_are_there_for_a_later_policy_as_they_were_derived(tiny_merged, tmp_path):
    folder = tiny_merged()
    sources = {"w8a8": folder / "w8a8", "w4a16": folder / "w4a16", "other": folder / "w4a16"}
    merge_checkpoints(sources, tmp_path / "merged")
    policy = DERIVE + rules("- {when: {tokens: {max: 1}}, use: other}", IN_INT4, "- use: w4a8")
    with engine(tmp_path / "merged", policy) as llm:
        expected = answers(llm, PROMPTS)
        refused = change(llm, "theirs", document(OTHER_SOURCE))["refused"]
        assert "theirs derives w4a8 otherwise than the policy that the server was started with" in refused
        for name, taken in (("ours", W4A8), ("w4a16", "w4a16"), ("back", policy)):
            assert "refused" not in change(llm, name, document(taken))
        assert llm.reset_prefix_cache()
        assert answers(llm, PROMPTS) == expected


@pytest.fixture(scope="module")
def expected(tiny_merged) -> dict[str, Answers]:
    """Return the answers of engines that were started with the policies."""
    policies = {"w8a8": "w8a8", "layered": LAYERED_DECODE}
    served = generate(tiny_merged() / "merged", list(policies.values()), PROMPTS)
    return {name: found.answers[0] for name, found in zip(policies, served, strict=True)}


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("policy-change") / "trace.jsonl"


@pytest.fixture(scope="module")
def shared(expected, trace, tiny_merged) -> Iterator[LLM]:
    """Yield the engine of the tests below; no other one starts beside it."""
    with engine(tiny_merged() / "merged", "phase", flexquant={"trace": str(trace)}) as llm:
        yield llm


@pytest.fixture
def llm(shared) -> Iterator[LLM]:
    """Yield an engine under the policy ``phase``."""
    yield shared
    assert "refused" not in change(shared, "phase", document("phase"))
    assert shared.reset_prefix_cache()


def test_a_failure_that_nobody_foresaw_changes_nothing(llm, monkeypatch):
    """The plan has not been built before."""
    model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
    expected = answers(llm, PROMPTS)
    for place in ("build_plan", "graphs"):
        with monkeypatch.context() as patch:
            patch.setattr(model, place, None)
            refused = change(llm, "last", document(LAST_IN_INT4))["refused"]
        assert re.match(r"(Attribute|Type)Error \('NoneType' .*, and the worker's log tells where", refused)
        assert served(llm) == "phase" and answers(llm, PROMPTS) == expected
    assert "refused" not in change(llm, "w4a16", document("w4a16"))


def test_answers_are_those_of_an_engine_that_was_started_with_the_policy(llm, expected):
    for name, policy in (("w8a8", "w8a8"), ("layered", LAYERED_DECODE)):
        assert "refused" not in change(llm, name, document(policy))
        assert llm.reset_prefix_cache()
        assert answers(llm, PROMPTS) == expected[name]
    assert expected["w8a8"] != expected["layered"]


def test_a_variant_that_is_derived_for_no_pass_need_not_be_there(llm):
    assert "refused" not in change(llm, "unreachable", document(UNREACHABLE))
    assert served(llm) == "unreachable"


def test_a_policy_replaces_those_alone_that_its_sender_has_seen(llm):
    (first,) = llm.collective_rpc("flexquant_status")
    seen = [first["policy"]["digest"]]
    assert "refused" not in change(llm, "mine", document("w8a8"), False, seen)
    refused = change(llm, "theirs", document("w4a16"), False, seen)["refused"]
    assert "the server took mine while theirs was being checked; look at GET /flexquant" in refused
    assert served(llm) == "mine"


def test_a_policy_that_cannot_be_noted_is_taken_all_the_same(llm, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError("no space left on the device")

    model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
    monkeypatch.setattr(model.records, "announce_policy", full)
    assert "refused" not in change(llm, "mine", document("w8a8"))
    assert served(llm) == "mine"


def test_another_policy_is_taken_between_two_passes_of_the_requests_under_way(llm, trace):
    parameters = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    before = len(records_of(trace))
    for number in range(3):
        llm.llm_engine.add_request(f"{number}", {"prompt_token_ids": [number + 1] * 20}, parameters)
    for step in range(9):
        if step == 5:
            assert "refused" not in change(llm, "layered", document(LAYERED_DECODE))
        finished = llm.llm_engine.step()
    assert [len(output.outputs[0].token_ids) for output in finished] == [9, 9, 9]
    told = records_of(trace)[before:]
    plans = [record.get("plan", "another policy") for record in told]
    assert plans == ["w8a8", *["w4a16"] * 4, "another policy", *["w8a8+w4a16[0]"] * 4]
    assert sum(record.get("scheduled_tokens", 0) for record in told) == 3 * (20 + 8)


def test_layers_that_may_not_be_mixed_stay_apart(llm):
    far = rules('- use: {default: w8a8, layers: {"99": w4a16}}')
    assert "names layer 99, but the model has 4 layers" in change(llm, "far", document(far))["refused"]
    assert "refused" not in change(llm, "last", document(LAST_IN_INT4))
