# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The moment of one pass after another, and the signal that it follows from; no engine."""

from __future__ import annotations

import dataclasses
import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexquant.policy.moments import CALM, Moment
from flexquant.policy.routes import build_route_table
from flexquant.policy.rules import load_policy
from flexquant.policy.trigger import Schedule, SignalTrigger
from flexquant.serving.worker import trigger_signal
from flexquant.serving.worker.forward_pass import Pass
from flexquant.serving.worker.moments import RunningMoments, running_moments
from flexquant.serving.worker.trigger_signal import signal_of

CPU = torch.device("cpu")
MAX_ENTROPY = SignalTrigger("entropy", "max", enter=0.5, leave=0.3, dwell=1)
SURE, UNSURE = torch.tensor([[9.0, 0.0, 0.0]]), torch.tensor([[0.0, 0.0, 0.0]])


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for vLLM's process groups, which no engine has made."""
    group = SimpleNamespace(broadcast=lambda signal: signal)
    monkeypatch.setattr(trigger_signal, "get_tp_group", lambda: group)


def begin(moments: RunningMoments, phase: Any = "decode", holds_prompt: bool | None = None) -> Pass:
    described = Pass(phase, 2, 2, 1 if phase == "decode" else 9, 2)
    return moments.place(described, phase != "decode" if holds_prompt is None else holds_prompt)


# signals by hand


def signal(logits: torch.Tensor, **settings: Any) -> float:
    found = signal_of(logits, dataclasses.replace(MAX_ENTROPY, **settings))
    assert found.dtype == torch.float32 and found.shape == ()
    return float(found)


HALF = torch.tensor([0.5, 0.25, 0.25, 0.0]).log()
QUARTERS = torch.tensor([0.25] * 4).log()


def test_entropy_is_in_nats_and_what_is_ruled_out_adds_nothing():
    assert signal(HALF[None]) == pytest.approx(1.5 * math.log(2))
    assert signal(QUARTERS[None] + 7) == pytest.approx(math.log(4))


def test_inverse_margin_is_that_of_the_two_likeliest_tokens():
    assert signal(HALF[None], signal="inverse_margin") == pytest.approx(4)
    assert signal(QUARTERS[None], signal="inverse_margin") == math.inf


@pytest.mark.parametrize(
    ("settings", "bits"),
    [
        ({"aggregate": "max"}, 2),
        ({"aggregate": "mean"}, 1.25),
        ({"aggregate": "quantile", "quantile": 0.5}, 1.5),
        ({"aggregate": "quantile", "quantile": 0.0}, 0),
    ],
)
def test_sequences_become_one_number(settings: dict[str, Any], bits: float):
    likely = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]])  # of 0, 1, 2 and 2 bit
    assert signal(likely.log(), **settings) == pytest.approx(bits * math.log(2))


@pytest.mark.parametrize("name", ["entropy", "inverse_margin"])
@pytest.mark.parametrize(
    "aggregate", [{"aggregate": "mean"}, {"aggregate": "max"}, {"aggregate": "quantile", "quantile": 0.1}]
)
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_logit_that_is_no_number_makes_the_pass_none(name, aggregate, wrong):
    logits = torch.zeros(3, 8)
    logits[:, 0] = 3
    assert not math.isnan(signal(logits, signal=name, **aggregate))
    logits[1, 4] = wrong
    assert math.isnan(signal(logits, signal=name, **aggregate))


def test_logits_may_be_of_16_bit():
    assert signal(QUARTERS[None].bfloat16()) == pytest.approx(math.log(4))


# passes one after another


def run(moments: RunningMoments, *logits: torch.Tensor | None) -> list[Pass]:
    """Return the decode passes with these logits."""
    found = []
    for one in logits:
        found.append(begin(moments))
        moments.measure(one, CPU)
    return found


def test_a_pass_follows_from_all_decode_passes_but_the_one_before_it():
    moments = RunningMoments(MAX_ENTROPY)
    begin(moments, "prefill")
    moments.measure(UNSURE, CPU)  # of a prompt, which no signal is of
    passes = run(moments, SURE, UNSURE, SURE, SURE, SURE)
    assert [p.moment for p in passes] == [
        Moment(1, False),
        Moment(2, False),
        Moment(3, False),
        Moment(4, True),
        Moment(5, False),
    ]
    assert [p.signal is None for p in passes] == [True, True, False, False, False]
    assert passes[3].signal == pytest.approx(math.log(3))


def test_prompts_in_between_change_nothing_of_it():
    moments = RunningMoments(MAX_ENTROPY)
    run(moments, UNSURE)
    begin(moments, "mixed")
    moments.measure(UNSURE, CPU)
    first, second = run(moments, SURE, SURE)
    assert (first.moment, second.moment) == (Moment(1, False), Moment(2, True))


def test_only_the_first_logits_after_a_decode_pass_are_its():
    """The other logits are those of prompts whose logprobs are asked for."""
    moments = RunningMoments(MAX_ENTROPY)
    begin(moments)
    moments.measure(SURE, CPU)
    moments.measure(UNSURE, CPU)
    assert [p.moment.unsure for p in run(moments, SURE, SURE, SURE)] == [False, False, False]


def test_a_decode_pass_without_logits_leaves_the_next_prompts_alone():
    moments = RunningMoments(MAX_ENTROPY)
    begin(moments)
    begin(moments, "prefill")
    moments.measure(UNSURE, CPU)
    assert [p.moment.unsure for p in run(moments, SURE, SURE, SURE)] == [False, False, False]


def test_logits_that_are_no_numbers_are_unsure_and_nothing_else():
    moments = RunningMoments(MAX_ENTROPY)
    passes = run(moments, torch.full((1, 3), math.nan), SURE, SURE, SURE)
    assert [p.moment.unsure for p in passes] == [False, False, True, False]
    assert passes[2].to_data()["signal"] is None
    json.dumps([p.to_data() for p in passes], allow_nan=False)


def test_before_the_first_pass_the_signal_is_computed_and_dropped(monkeypatch):
    moments, computed = RunningMoments(MAX_ENTROPY), []

    def counted(logits: torch.Tensor, trigger: SignalTrigger) -> torch.Tensor:
        computed.append(logits)
        return signal_of(logits, trigger)

    monkeypatch.setattr(trigger_signal, "signal_of", counted)
    moments.measure(UNSURE, CPU)
    assert len(computed) == 1, "as vLLM's profiling has it, which counts the memory"
    begin(moments, "prefill")
    moments.measure(UNSURE, CPU)
    assert len(computed) == 1
    assert not any(p.moment.unsure for p in run(moments, SURE, SURE, SURE))


def test_a_rank_without_logits_takes_the_signal_of_the_first(monkeypatch):
    def broadcast(signal: torch.Tensor) -> torch.Tensor:
        return signal.copy_(torch.tensor(5.0))

    monkeypatch.setattr(trigger_signal, "get_tp_group", lambda: SimpleNamespace(broadcast=broadcast))
    passes = run(RunningMoments(MAX_ENTROPY), None, None, SURE)
    assert passes[-1].moment == Moment(3, True)
    assert passes[-1].signal == 5.0


def test_a_schedule_repeats_over_decode_passes():
    moments = RunningMoments(Schedule("100"))
    states = []
    for phase in ["prefill", *["decode"] * 2, "mixed", *["decode"] * 5]:
        states.append(begin(moments, phase).moment)
    assert "".join("01"[m.unsure] for m in states if m.since_prompt) == "1001001"
    assert states[0] == states[3] == Moment(0, False)
    assert [m.since_prompt for m in states] == [0, 1, 2, 0, 1, 2, 3, 4, 5]


def test_a_prompt_of_which_one_token_was_left_begins_the_count():
    moments = RunningMoments(None)
    found = [begin(moments, holds_prompt=holds).moment.since_prompt for holds in (False, False, True, False)]
    assert found == [1, 2, 1, 2]


def test_who_tells_no_moments_apart_is_not_followed():
    routes = build_route_table(load_policy("phase"), ["w8a8", "w4a16"], 2, 16)
    assert running_moments(routes) is None
    data = Pass("decode", 2, 2, 1, 2).to_data()
    assert data == {"phase": "decode", "tokens": 2, "sequences": 2, "max_query_len": 1, "scheduled_tokens": 2}
    assert Pass("decode", 2, 2, 1, 2).moment is CALM
