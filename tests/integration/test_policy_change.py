# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Another policy on an eager engine: what it may use, and that answers are those of its plans.

A live server is asked in test_live_server, and engines with CUDA graphs in tests/gpu/test_policy_change.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from flexquant.policy.rules import load_policy
from tests.integration.conftest import answers, engine, generate
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


def change(llm: Any, name: str, document: dict[str, Any]) -> dict[str, Any]:
    (told,) = llm.collective_rpc("flexquant_change_policy", args=(name, document, False))
    return told


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
        other = {**document, "derive": {"w4a8": {"from": "w4a16", "activations": "fp8"}}}
        assert "refused" in change(llm, "other", other)
        assert "refused" not in change(llm, "back", document)
        assert llm.reset_prefix_cache()
        assert answers(llm, PROMPTS) == expected


def test_layers_that_may_not_be_mixed_stay_apart(tiny_merged):
    with engine(tiny_merged() / "merged", "phase") as llm:
        far = {
            "schema": "flexquant.policy/v1",
            "rules": [{"use": {"default": "w8a8", "layers": {"99": "w4a16"}}}],
        }
        assert "names layer 99, but the model has 4 layers" in change(llm, "far", far)["refused"]
        assert "refused" not in change(llm, "last", yaml.safe_load(LAST_IN_INT4))
