# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A policy's trigger: what a document may say, and when it is on."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from flexquant.errors import FlexQuantError
from flexquant.policy.rules import Policy, load_policy, parse_policy
from flexquant.policy.trigger import Schedule, SignalTrigger, Switch, describe_trigger
from tests.policies import TRIGGERED

SIGNAL = {"signal": "entropy", "aggregate": "max", "enter": 2.5}


def policy(trigger: Any) -> Policy:
    rules = [{"when": {"phase": "decode", "unsure": True}, "use": "w8a8"}, {"use": "w4a16"}]
    document = {"schema": "flexquant.policy/v1", "experimental": {"trigger": trigger}, "rules": rules}
    return parse_policy(document, "p.yaml")


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (SIGNAL, SignalTrigger("entropy", "max", 2.5, 2.5, 1)),
        (
            {"signal": "inverse_margin", "aggregate": "mean", "enter": 4, "leave": 0, "dwell": 9},
            SignalTrigger("inverse_margin", "mean", 4.0, 0.0, 9),
        ),
        (
            {**SIGNAL, "aggregate": "quantile", "quantile": 0.9},
            SignalTrigger("entropy", "quantile", 2.5, 2.5, 1, 0.9),
        ),
        ({"schedule": "1000"}, Schedule("1000")),
    ],
)
def test_every_key_is_read_and_survives_storing(document, expected):
    found = policy(document)
    assert found.trigger == expected
    assert parse_policy(json.loads(json.dumps(found.document))).trigger == expected


@pytest.mark.parametrize(
    ("trigger", "message"),
    [
        (None, "experimental.trigger is null; give a mapping with the keys signal, aggregate, enter"),
        ({}, "experimental.trigger lacks the key 'signal'; add it"),
        ({**SIGNAL, "signal": "perplexity"}, 'signal is "perplexity"; give one of entropy, inverse_margin'),
        ({**SIGNAL, "signal": ["entropy"]}, 'signal is ["entropy"]; give one of entropy, inverse_margin'),
        ({**SIGNAL, "aggregate": "min"}, 'aggregate is "min"; give one of mean, max, quantile'),
        ({**SIGNAL, "enter": "2"}, 'enter is "2"; give a number of at least 0'),
        ({**SIGNAL, "enter": True}, "enter is true; give a number of at least 0"),
        ({**SIGNAL, "enter": math.nan}, "enter is NaN; give a number of at least 0"),
        ({**SIGNAL, "enter": 10**400}, "give a number of at least 0"),
        ({**SIGNAL, "leave": math.inf}, "leave is Infinity; give a number of at least 0"),
        ({**SIGNAL, "leave": 3}, "leave is 3.0, above enter, which is 2.5; give at most that"),
        ({**SIGNAL, "dwell": 0}, "dwell is 0; give a whole number of at least 1"),
        ({**SIGNAL, "dwell": 1.5}, "dwell is 1.5; give a whole number of at least 1"),
        ({**SIGNAL, "hold": 2}, "trigger.hold is an unknown key; the allowed ones here are signal,"),
        ({**SIGNAL, "aggregate": "quantile"}, "lacks the key 'quantile', which that aggregate needs"),
        (
            {**SIGNAL, "aggregate": "quantile", "quantile": 90},
            "quantile is 90.0; give a number from 0 to 1",
        ),
        (
            {**SIGNAL, "quantile": 0.5},
            "quantile is for 'aggregate: quantile', but this one is max; remove it",
        ),
        ({"schedule": 1000}, "schedule is 1000; give 1 to 100000 of the characters 0 and 1 in quotes"),
        ({"schedule": ""}, 'schedule is ""; give 1 to 100000 of'),
        ({"schedule": "10\n"}, 'schedule is "10\\n"; give 1 to 100000 of'),
        ({"schedule": "1" * 100_001}, "give 1 to 100000 of"),
        (
            {"schedule": "10", "dwell": 2},
            "trigger.dwell is an unknown key; the allowed ones here are schedule",
        ),
    ],
)
def test_a_wrong_trigger_is_refused(trigger, message):
    with pytest.raises(FlexQuantError) as error:
        policy(trigger)
    assert str(error.value).startswith("p.yaml: experimental.trigger")
    assert message in str(error.value)


def test_a_trigger_and_a_rule_that_asks_for_it_need_each_other():
    document = policy(SIGNAL).document
    with pytest.raises(FlexQuantError, match=r"rules\[0\].when.unsure needs the key 'experimental'"):
        parse_policy({key: value for key, value in document.items() if key != "experimental"})
    with pytest.raises(FlexQuantError, match=r"experimental.trigger is used by no rule; remove it, or ask"):
        parse_policy({**document, "rules": [{"use": "w8a8"}]})
    with pytest.raises(FlexQuantError, match="experimental lacks the key 'trigger'"):
        parse_policy({**document, "experimental": {}})


def states(signals: list[float], **settings: Any) -> str:
    """Return whether each next pass is unsure, as a pattern."""
    switch = Switch(SignalTrigger("entropy", "max", **{"enter": 2.0, "leave": 1.0, "dwell": 1, **settings}))
    found = []
    for signal in signals:
        switch.take(signal)
        found.append("1" if switch.is_on else "0")
    return "".join(found)


def test_it_turns_on_at_enter_and_off_below_leave():
    assert states([1.9, 2.0, 1.5, 1.0, 0.9, 1.9, 2.5, 0.0]) == "01110010"
    assert states([1.9, 2.0, 1.9, 2.0], leave=2.0) == "0101"


def test_it_stays_as_it_is_for_as_many_passes_as_it_dwells():
    assert states([5, 0, 0, 0, 5, 5, 5, 5, 0], dwell=3) == "111000111"
    assert states([0, 5, 0, 0], dwell=2) == "0110", "the first signal that asks for it is followed at once"


@pytest.mark.parametrize("signal", [math.nan, math.inf])
def test_what_is_no_number_is_unsure(signal):
    assert states([signal, 0, signal, signal, 0]) == "10110"


def test_a_schedule_is_told_in_short():
    assert describe_trigger(Schedule("10")) == "decode passes by the pattern 10"
    assert describe_trigger(Schedule("10" * 50)).endswith("by the pattern " + "10" * 20 + "... (100 passes)")
    quantile = SignalTrigger("entropy", "quantile", 2.0, 1.0, 3, 0.9)
    assert "from entropy (quantile 0.9) of at least 2" in describe_trigger(quantile)


def test_a_file_with_a_trigger_is_read(tmp_path):
    (tmp_path / "p.yaml").write_text(TRIGGERED)
    assert load_policy(str(tmp_path / "p.yaml")).trigger == SignalTrigger("entropy", "mean", 2.5, 1.5, 2)
