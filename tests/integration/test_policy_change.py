# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Another policy on an eager engine: what it may use, and that answers are those of its plans.

A live server is asked in test_live_server, and engines with CUDA graphs in tests/gpu/test_policy_change.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from vllm import SamplingParams

from flexquant.merge import merge_checkpoints
from flexquant.policy.rules import load_policy
from tests.integration.conftest import answers, change, engine, generate
from tests.policies import LAYERED_DECODE

pytestmark = pytest.mark.engine
PROMPTS = ["a prompt of some words", "another one"]
LAST_IN_INT4 = """
schema: flexquant.policy/v1
rules:
  - use: {default: w8a8, layers: {"-1": w4a16}}
"""
W4A8 = """
schema: flexquant.policy/v1
derive: {w4a8: {from: w4a16, activations: int8}}
rules:
  - when: {phase: decode}
    use: w4a16
  - use: w4a8
"""


UNREACHABLE = W4A8.replace("- use: w4a8", "- when: {tokens: {min: 1000000}}\n    use: w4a8\n  - use: w8a8")
"""A policy whose derived variant is for passes larger than any."""
OTHER_SOURCE = W4A8.replace("from: w4a16", "from: other").replace("use: w4a16", "use: other")


def served(llm: Any) -> str:
    (status,) = llm.collective_rpc("flexquant_status")
    return status["policy"]["name"]


def test_answers_are_those_of_an_engine_that_was_started_with_the_policy(tiny_merged):
    merged = tiny_merged() / "merged"
    policies = {"w8a8": load_policy("w8a8").document, "layered": yaml.safe_load(LAYERED_DECODE)}
    expected = {
        name: generate(merged, [yaml.safe_dump(document)], PROMPTS)[0].answers[0]
        for name, document in policies.items()
    }
    with engine(merged, "phase") as llm:
        for name, document in policies.items():
            assert "refused" not in change(llm, name, document)
            assert llm.reset_prefix_cache()
            assert answers(llm, PROMPTS) == expected[name]
    assert expected["w8a8"] != expected["layered"]


def test_variants_that_were_not_loaded_are_refused_with_what_is_there(tiny_merged):
    with engine(tiny_merged() / "merged", "w8a8") as llm:
        before = llm.collective_rpc("flexquant_status")
        refused = change(llm, "phase", load_policy("phase").document)["refused"]
        assert "phase uses w4a16, but the server has loaded w8a8; take a policy" in refused
        refused = change(llm, "deep", {**load_policy("w8a8").document, "rules": []})["refused"]
        assert "deep: rules is []" in refused
        assert llm.collective_rpc("flexquant_status") == before


def test_derived_variants_are_there_for_a_later_policy_as_they_were_derived(tiny_merged, tmp_path):
    (tmp_path / "w4a8.yaml").write_text(W4A8)
    document = yaml.safe_load(W4A8)
    merged = tiny_merged() / "merged"
    with engine(merged, str(tmp_path / "w4a8.yaml")) as llm:
        (expected,) = [answers(llm, PROMPTS)]
        assert "refused" not in change(llm, "w4a16", load_policy("w4a16").document)
        assert "refused" not in change(llm, "back", document)
        assert llm.reset_prefix_cache()
        assert answers(llm, PROMPTS) == expected


def test_a_variant_that_was_derived_from_another_is_refused(tiny_merged, tmp_path):
    folder = tiny_merged()
    sources = {"w8a8": folder / "w8a8", "w4a16": folder / "w4a16", "other": folder / "w4a16"}
    merge_checkpoints(sources, tmp_path / "merged")
    policy = W4A8.replace("rules:", "rules:\n  - when: {tokens: {max: 1}}\n    use: other")
    (tmp_path / "w4a8.yaml").write_text(policy)
    with engine(tmp_path / "merged", str(tmp_path / "w4a8.yaml")) as llm:
        refused = change(llm, "theirs", yaml.safe_load(OTHER_SOURCE))["refused"]
        assert "theirs derives w4a8 otherwise than the policy that the server was started with" in refused
        assert "refused" not in change(llm, "ours", yaml.safe_load(W4A8))


def test_a_variant_that_is_derived_for_no_pass_need_not_be_there(tiny_merged):
    with engine(tiny_merged() / "merged", "phase") as llm:
        assert "refused" not in change(llm, "unreachable", yaml.safe_load(UNREACHABLE))
        assert served(llm) == "unreachable"


def test_a_failure_that_nobody_foresaw_changes_nothing(tiny_merged, monkeypatch):
    w4a16 = load_policy("w4a16").document
    with engine(tiny_merged() / "merged", "phase") as llm:
        model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
        expected = answers(llm, PROMPTS)
        for place in ("build_plan", "graphs"):
            with monkeypatch.context() as patch:
                patch.setattr(model, place, None)
                refused = change(llm, "layered", yaml.safe_load(LAYERED_DECODE))["refused"]
            assert re.match(
                r"(Attribute|Type)Error \('NoneType' .*, and the worker's log tells where", refused
            )
            assert served(llm) == "phase"
            assert answers(llm, PROMPTS) == expected
        assert "refused" not in change(llm, "w4a16", w4a16)


def test_a_policy_replaces_those_alone_that_its_sender_has_seen(tiny_merged):
    w8a8, w4a16 = load_policy("w8a8").document, load_policy("w4a16").document
    with engine(tiny_merged() / "merged", "phase") as llm:
        (first,) = llm.collective_rpc("flexquant_status")
        seen = [first["policy"]["digest"]]
        assert "refused" not in change(llm, "mine", w8a8, False, seen)
        refused = change(llm, "theirs", w4a16, False, seen)["refused"]
        assert "the server took mine while theirs was being checked; look at GET /flexquant" in refused
        assert served(llm) == "mine"


def test_a_policy_that_cannot_be_noted_is_taken_all_the_same(tiny_merged, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError("no space left on the device")

    with engine(tiny_merged() / "merged", "phase") as llm:
        model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
        monkeypatch.setattr(model.records, "announce_policy", full)
        assert "refused" not in change(llm, "mine", load_policy("w8a8").document)
        assert served(llm) == "mine"


def test_another_policy_is_taken_between_two_passes_of_the_requests_under_way(tiny_merged, tmp_path):
    trace = tmp_path / "trace.jsonl"
    parameters = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    with engine(tiny_merged() / "merged", "phase", flexquant={"trace": str(trace)}) as llm:
        for number in range(3):
            llm.llm_engine.add_request(f"{number}", {"prompt_token_ids": [number + 1] * 20}, parameters)
        for step in range(9):
            if step == 5:
                assert "refused" not in change(llm, "layered", yaml.safe_load(LAYERED_DECODE))
            finished = llm.llm_engine.step()
        assert [len(output.outputs[0].token_ids) for output in finished] == [9, 9, 9]
    passes = [json.loads(line) for line in trace.read_text().splitlines()]
    (start, place) = [i for i, record in enumerate(passes) if "policy" in record]
    plans = [record["plan"] for record in passes[start + 1 : place] + passes[place + 1 :]]
    assert plans == ["w8a8", *["w4a16"] * 4, *["w8a8+w4a16[0]"] * 4]
    assert sum(record.get("scheduled_tokens", 0) for record in passes) == 3 * (20 + 8)


def test_layers_that_may_not_be_mixed_stay_apart(tiny_merged):
    with engine(tiny_merged() / "merged", "phase") as llm:
        far = {
            "schema": "flexquant.policy/v1",
            "rules": [{"use": {"default": "w8a8", "layers": {"99": "w4a16"}}}],
        }
        assert "names layer 99, but the model has 4 layers" in change(llm, "far", far)["refused"]
        assert "refused" not in change(llm, "last", yaml.safe_load(LAST_IN_INT4))
