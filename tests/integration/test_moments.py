# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Policies that tell moments of decoding apart, on an engine: a floor after prompts, and a trigger.

Two tensor-parallel ranks are asked in test_tensor_parallel, CUDA graphs in tests/gpu/test_moments.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import yaml
from vllm import SamplingParams

from flexquant.policy.trigger import SignalTrigger, Switch
from flexquant.serving.frontend.answers import ServedRequests, Status
from tests.integration.conftest import answers, engine, generate, take_policy
from tests.policies import FLOOR, TRIGGERED, scheduled, triggered

pytestmark = pytest.mark.engine
PROMPTS = ["a prompt of some words", "another one", "and a third, which is the longest of all"]
TOKENS = 12
EXACT = {"max_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def merged(tiny_merged: Any) -> Path:
    return tiny_merged() / "merged"


def expected_plan(since_prompt: int) -> str:
    """Return the plan that ``FLOOR`` gives, written down by hand."""
    return "w8a8" if since_prompt <= 3 else "w4a16"


def states(passes: list[dict[str, Any]]) -> str:
    """Return which decode passes were unsure, as a pattern."""
    return "".join("01"[p["unsure"]] for p in passes if p["phase"] == "decode")


# the floor


def test_the_first_decode_passes_after_every_prompt_take_the_floors_plan(merged):
    (served,) = generate(merged, [FLOOR], PROMPTS, PROMPTS[:1], sampling=EXACT)
    decode = [p for p in served.passes if p["phase"] == "decode"]
    assert [p["since_prompt"] for p in decode] == 2 * [*range(1, TOKENS)]
    assert {p["since_prompt"] for p in served.passes if p["phase"] != "decode"} == {0}
    for p in decode:
        assert p["plan"] == expected_plan(p["since_prompt"]), p
        assert not p["unsure"] and "signal" not in p


class Stepped:
    """An engine that takes one step at a time, under a policy that writes a trace."""

    def __init__(self, llm: Any, trace: Path) -> None:
        self.engine, self._trace = llm.llm_engine, trace
        self._requests = 0

    def add(self, prompt: list[int], tokens: int) -> None:
        parameters = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
        self.engine.add_request(str(self._requests), {"prompt_token_ids": prompt}, parameters)
        self._requests += 1

    def step(self, times: int | None = None) -> int:
        """Take some steps, or all that are left; return how many tokens were answered in the end."""
        tokens = 0
        while self.engine.has_unfinished_requests() and times != 0:
            for output in self.engine.step():
                tokens += len(output.outputs[0].token_ids) if output.finished else 0
            times = None if times is None else times - 1
        return tokens

    @property
    def passes(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self._trace.read_text().splitlines()]
        return [line for line in lines if "phase" in line]


@pytest.fixture
def floored(merged, tmp_path):
    """Yield an engine under ``FLOOR`` that takes one step at a time."""
    (tmp_path / "floor.yaml").write_text(FLOOR)
    trace = tmp_path / "trace.jsonl"
    with engine(merged, str(tmp_path / "floor.yaml"), flexquant={"trace": str(trace)}) as llm:
        yield llm, Stepped(llm, trace)


def test_a_prompt_begins_the_count_for_all_and_a_single_token_is_one(floored):
    _, stepped = floored
    stepped.add([5, 6, 7, 8], 14)
    stepped.step(6)
    stepped.add([9, 10, 11], 8)
    stepped.step(3)
    stepped.add([12], 4)
    assert stepped.step() == 14 + 8 + 4
    passes = stepped.passes
    assert [(p["phase"], p["since_prompt"]) for p in passes[:7]] == [
        ("prefill", 0),
        *(("decode", n) for n in range(1, 6)),
        ("mixed", 0),
    ]
    # The prompt of one token is computed in a decode pass, the first of its floor.
    assert [p["since_prompt"] for p in passes[7:]] == [1, 2, 1, 2, 3, 4, 5]
    assert [p["sequences"] for p in passes[7:]] == [2, 2, 3, 3, 3, 3, 2]
    for p in passes:
        assert p["plan"] == ("w8a8" if p["phase"] != "decode" else expected_plan(p["since_prompt"])), p


def test_status_requests_and_policy_changes_tell_of_moments(floored):
    llm, stepped = floored
    llm.collective_rpc("flexquant_follow_requests")
    stepped.add([5, 6, 7, 8], 10)
    stepped.step(6)
    (status,) = llm.collective_rpc("flexquant_status")
    given = {**status, "ranks": 1}
    assert Status.model_validate(given).model_dump(exclude_unset=True, mode="json") == given
    json.dumps(given, allow_nan=False)
    assert [(row["plan"], row.get("moment")) for row in status["routes"]["decode"]] == [
        ("w8a8", "since_prompt 1-3"),
        ("w4a16", "since_prompt 4+"),
    ]
    last = status["last_pass"]
    assert (last["since_prompt"], last["unsure"], last["moment"]) == (5, False, "since_prompt 4+")

    (found,) = llm.collective_rpc("flexquant_requests", args=("0",))
    ServedRequests.model_validate({"requests": found})
    assert [(run["plan"], run["tokens"], run.get("moment")) for run in found[0]["plans"]] == [
        ("w8a8", 4, None),
        ("w8a8", 3, "since_prompt 1-3"),
        ("w4a16", 2, "since_prompt 4+"),
    ]

    later = yaml.safe_load(FLOOR.replace("max: 3", "max: 2"))
    (told,) = llm.collective_rpc("flexquant_change_policy", args=("later", later, False))
    assert [(row["before"], row["after"], row["moment"]) for row in told["routes"]] == [
        ("w8a8", "w4a16", "since_prompt 3")
    ]
    stepped.step()
    decode = [p for p in stepped.passes if p["phase"] == "decode"]
    # To the policy that was taken, its change counts as a prompt.
    assert [p["since_prompt"] for p in decode] == [1, 2, 3, 4, 5, 1, 2, 3, 4]
    assert [p["plan"] for p in decode[5:]] == ["w8a8", "w8a8", "w4a16", "w4a16"]

    plain = {"schema": "flexquant.policy/v1", "rules": [{"use": "w8a8"}]}
    (told,) = llm.collective_rpc("flexquant_change_policy", args=("plain", plain, False))
    assert {row["moment"] for row in told["routes"]} == {"since_prompt 3+"}
    stepped.add([5, 6, 7, 8, 9], 3)
    stepped.step()
    assert "since_prompt" not in stepped.passes[-1] and "unsure" not in stepped.passes[-1]
    (status,) = llm.collective_rpc("flexquant_status")
    assert all("moment" not in row for row in status["routes"]["decode"])


# the trigger


NEVER = triggered(enter=1e9)
FULL = {**EXACT, "logprobs": -1}
"""Sampling that returns the log-probabilities of all tokens."""


def entropies(found: Any) -> list[float]:
    """Return the mean entropy of each step in nats, from answers with the log-probabilities of all tokens."""
    per_sequence = [
        [-sum(math.exp(log_p) * log_p for log_p in step.values() if log_p > -math.inf) for step in steps]
        for _, steps in found
    ]
    return [sum(step) / len(step) for step in zip(*per_sequence, strict=True)]


@pytest.fixture(scope="module")
def served(merged) -> dict[str, Any]:
    """Return answers and passes of policies without unsure passes, with some, and with these by a pattern."""
    options = {"max_logprobs": -1}
    (never,) = generate(merged, [NEVER], PROMPTS, sampling=FULL, **options)
    middle = median(entropies(never.answers[0])[1:])
    sometimes = triggered(enter=middle, leave=middle)
    (some,) = generate(merged, [sometimes], PROMPTS, sampling=FULL, **options)
    (again,) = generate(merged, [scheduled(states(some.passes))], PROMPTS, sampling=FULL, **options)
    return {"never": never, "some": some, "again": again, "middle": middle}


def test_signals_and_states_are_those_that_the_log_probabilities_give(served):
    assert states(served["never"].passes) == "0" * (TOKENS - 1)
    passes = [p for p in served["some"].passes if p["phase"] == "decode"]
    expected = entropies(served["some"].answers[0])[1:]  # the first step is the prefill pass's
    # A pass knows the signals of all decode passes but the one before it.
    assert "signal" not in passes[0] and "signal" not in passes[1]
    assert [p["signal"] for p in passes[2:]] == pytest.approx(expected[:-2], rel=1e-4)
    switch = Switch(SignalTrigger("entropy", "mean", served["middle"], served["middle"], dwell=1))
    for number, p in enumerate(passes):
        if number >= 2:
            switch.take(p["signal"])
        assert p["unsure"] == switch.is_on, number
        assert p["plan"] == ("w8a8" if p["unsure"] else "w4a16")
    assert set(states(passes)) == {"0", "1"}


def test_a_recorded_run_is_replayed_by_its_pattern(served):
    some, again = served["some"], served["again"]
    assert again.answers == some.answers
    assert [p["plan"] for p in again.passes] == [p["plan"] for p in some.passes]
    assert states(again.passes) == states(some.passes)
    assert again.answers != served["never"].answers


def test_a_schedule_goes_on_from_batch_to_batch(merged):
    (found,) = generate(merged, [scheduled("1000")], PROMPTS, PROMPTS[:1], sampling=EXACT)
    assert states(found.passes) == ("1000" * TOKENS)[: 2 * (TOKENS - 1)]
    plans = [p["plan"] for p in found.passes if p["phase"] == "decode"]
    assert plans == ["w8a8" if state == "1" else "w4a16" for state in states(found.passes)]


def test_logits_that_are_no_numbers_make_a_pass_unsure_and_lose_nothing(merged, tmp_path):
    (tmp_path / "p.yaml").write_text(NEVER)
    trace = tmp_path / "trace.jsonl"
    with engine(merged, str(tmp_path / "p.yaml"), flexquant={"trace": str(trace)}) as llm:
        calls = []

        def spoil(model: Any) -> None:
            for plan in model._plans.values():
                compute = plan.compute_logits

                def computed(hidden: torch.Tensor, compute: Any = compute) -> torch.Tensor:
                    calls.append(hidden)
                    logits = compute(hidden)
                    return torch.full_like(logits, math.nan) if len(calls) == 4 else logits

                plan.compute_logits = computed

        llm.apply_model(spoil)
        found = answers(llm, PROMPTS, **EXACT)
        (status,) = llm.collective_rpc("flexquant_status")
        json.dumps(status, allow_nan=False)
    assert [len(tokens) for tokens, _ in found] == [TOKENS] * 3
    passes = [json.loads(line) for line in trace.read_text().splitlines()][1:]
    decode = [p for p in passes if p["phase"] == "decode"]
    # The fourth logits are those of the third decode pass, and the fifth pass follows from them.
    assert states(decode) == "00001000000"
    assert decode[4]["signal"] is None and decode[5]["signal"] is not None


def test_a_policy_with_a_trigger_is_taken_while_requests_are_under_way(merged, tmp_path):
    trace = tmp_path / "trace.jsonl"
    with engine(merged, "phase", flexquant={"trace": str(trace)}) as llm:
        stepped = Stepped(llm, trace)
        stepped.add([5, 6, 7, 8], 12)
        stepped.step(4)
        always = yaml.safe_load(triggered(enter=0, leave=0))
        (told,) = llm.collective_rpc("flexquant_change_policy", args=("always", always, False))
        assert {row["moment"] for row in told["routes"]} == {"unsure"}
        assert stepped.step() == 12
    decode = [p for p in stepped.passes if p["phase"] == "decode"]
    assert all("unsure" not in p for p in decode[:3])
    assert states(decode[3:]) == "00111111", "from the third pass on, which the first signal decides"


def test_a_test_that_takes_a_policy_begins_to_count_anew(merged):
    with engine(merged, "phase") as llm:
        take_policy(llm, TRIGGERED)
        answers(llm, PROMPTS[:1], **EXACT)
        (status,) = llm.collective_rpc("flexquant_status")
        assert status["last_pass"]["since_prompt"] == TOKENS - 1
        take_policy(llm, "phase")
        answers(llm, PROMPTS[:1], **EXACT)
        (status,) = llm.collective_rpc("flexquant_status")
        assert "since_prompt" not in status["last_pass"]
