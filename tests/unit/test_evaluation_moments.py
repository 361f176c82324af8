# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Evaluation of policies whose decode passes take several plans at one batch size; no engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexquant.evaluation.inputs import Subject
from flexquant.evaluation.schedule import Passes, PolicyRun, describe_plans, find_candidates, make_schedule
from flexquant.policy.plans import Plan
from tests.policies import FLOOR, TRIGGERED

TOKENS = 6
FIVE = FLOOR.replace("max: 3", "max: 5")
SEVEN = FLOOR.replace("max: 3", "max: 7")
SMALL_BATCHES = TRIGGERED.replace("unsure: true", "unsure: true, batch_size: {max: 2}")
OFTEN = TRIGGERED.replace("enter: 2.5", "enter: 1.5")
W8A8, W4A16 = (Plan.from_name(name, 2) for name in ("w8a8", "w4a16"))


@pytest.fixture(scope="module")
def runs(merged: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], PolicyRun]:
    """Return the runs, keyed by the name of a policy and the batch size."""
    folder = tmp_path_factory.mktemp("policies")
    policies = {"floor": FLOOR, "five": FIVE, "seven": SEVEN, "triggered": TRIGGERED}
    policies |= {"small": SMALL_BATCHES, "often": OFTEN, "again": TRIGGERED}
    for name, text in policies.items():
        (folder / name).write_text(text)
    subject = Subject.open(merged)
    candidates = find_candidates(subject, ["w8a8", "phase", *(str(folder / name) for name in policies)])
    found = make_schedule(candidates, subject, (2, 4), 16, TOKENS, 100)
    return {(run.candidate.name, run.batch_size): run for run in found}


def test_the_first_passes_after_the_prompts_take_the_plan_of_their_rule(runs):
    plans = runs["floor", 4].decode_plans
    assert plans.sure == plans.unsure == (W8A8, W8A8, W8A8, W4A16, W4A16)
    assert plans.counts(3, {}) == {W8A8: 9, W4A16: 6}
    assert describe_plans(plans.counts(3, {})) == "w8a8 60.0%, w4a16 40.0%"
    assert describe_plans(runs["five", 4].decode_plans.counts(3, {})) == "w8a8"


def test_runs_share_their_numbers_if_all_their_passes_take_the_same_plans(runs):
    assert runs["floor", 2].same_as is None
    assert runs["floor", 4].same_as == ("floor", 2)
    for name in ("five", "seven"):
        assert runs[name, 2].same_as == ("w8a8", 2), "no row goes on beyond its floor"
    assert runs["seven", 2].answers_same_as is None, "answers may"


def test_what_a_trigger_decides_is_the_same_only_under_the_same_trigger_and_batch_size(runs):
    assert runs["triggered", 2].same_as is None
    assert runs["again", 2].same_as == ("triggered", 2)
    assert runs["often", 2].same_as is None
    assert runs["triggered", 4].same_as is None
    assert runs["small", 2].same_as == ("triggered", 2)
    assert runs["small", 4].same_as == ("phase", 2), "whose rule takes no batch of four"
    assert runs["again", 2].answers_same_as == "triggered"
    assert runs["small", 2].answers_same_as == "triggered", "no batch is larger"
    assert runs["often", 2].answers_same_as is None


def trace_of(tmp_path: Path, unsure: list[str], plans: str) -> Path:
    """Return a trace whose decode passes are unsure by patterns; ``plans``: 8 (W8A8) or 4 for each."""
    lines: list[dict[str, object]] = [{"policy": "p"}]
    taken = iter(plans)
    for pattern in unsure:
        lines.append({"phase": "prefill", "sequences": 2, "plan": "w8a8", "since_prompt": 0, "unsure": False})
        for number, state in enumerate(pattern, 1):
            plan = {"8": "w8a8", "4": "w4a16"}[next(taken)]
            line = {"phase": "decode", "sequences": 2, "plan": plan, "since_prompt": number}
            lines.append({**line, "unsure": state == "1"})
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "trace.jsonl"


def test_the_trace_tells_which_passes_were_unsure(runs, tmp_path):
    passes = Passes.from_trace(trace_of(tmp_path, ["00110", "01100"], "4488448844"))
    assert passes.unsure == passes.to_data()["unsure"] == {2: 1, 3: 2, 4: 1}
    decode = runs["triggered", 2].decode_plans.counts(2, passes.unsure)
    assert decode == {W8A8: 4, W4A16: 6}
    names = {plan.name: count for plan, count in decode.items()}
    assert passes.deviations("w8a8", names, batch_size=2, batches=2) == []


def test_a_pass_that_did_not_follow_the_trigger_is_told(runs, tmp_path):
    passes = Passes.from_trace(trace_of(tmp_path, ["01000"], "44444"))
    names = {p.name: n for p, n in runs["triggered", 2].decode_plans.counts(1, passes.unsure).items()}
    assert passes.deviations("w8a8", names, batch_size=2, batches=1) == [
        "decode passes were 5 of w4a16, but 1 of w8a8, 4 of w4a16 were meant"
    ]


def test_without_unsure_passes_the_document_does_not_speak_of_them(tmp_path):
    assert "unsure" not in Passes.from_trace(trace_of(tmp_path, ["00"], "44")).to_data()
