# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Policies that tell moments of decoding apart: their tables, and what another policy changes of them."""

from __future__ import annotations

import json
import random
from itertools import product
from typing import Any

import pytest

from flexquant import cli
from flexquant.errors import FlexQuantError
from flexquant.policy.moments import CALM, Moment, Span, count_since_prompt
from flexquant.policy.route_changes import route_changes
from flexquant.policy.routes import RouteTable, build_route_table, matching_rules
from flexquant.policy.rules import Policy, Rule, load_policy, parse_policy
from flexquant.policy.schema import PHASES
from tests.policies import FLOOR

VARIANTS = ("w8a8", "w4a16", "fp8")
TOKENS = 24
TRIGGER = {"trigger": {"signal": "entropy", "aggregate": "max", "enter": 2, "leave": 1, "dwell": 4}}


def policy(*rules: dict[str, Any], **others: Any) -> Policy:
    document = {"schema": "flexquant.policy/v1", "rules": list(rules), **others}
    return parse_policy(document, source="p.yaml")


def decode(use: str, **when: Any) -> dict[str, Any]:
    return {"when": {"phase": "decode", **when}, "use": use}


def table(policy: Policy, **options: Any) -> RouteTable:
    return build_route_table(policy, VARIANTS, num_layers=2, max_tokens=TOKENS, **options)


FLOORED = policy(decode("w8a8", since_prompt={"max": 16}), decode("w4a16"), {"use": "w8a8"})
WITH_BOTH = policy(
    decode("w8a8", since_prompt={"max": 4}, batch_size={"min": 3}),
    decode("fp8", unsure=True, since_prompt={"min": 3}),
    decode("w4a16", batch_size={"max": 8}),
    {"use": "w8a8"},
    experimental=TRIGGER,
)


def test_the_first_passes_after_a_prompt_take_the_rule_for_them():
    routes = table(FLOORED)
    names = {n: routes.lookup("decode", 1, Moment(n, False)).name for n in (1, 16, 17, 10**9)}
    assert names == {1: "w8a8", 16: "w8a8", 17: "w4a16", 10**9: "w4a16"}
    assert routes.lookup("decode", 1).name == "w4a16", "long after any prompt, where nobody counts"
    assert [plan.name for plan in routes.plans] == ["w8a8", "w4a16"]


def test_lookups_agree_with_the_rules_at_every_moment():
    for tokens_per_sequence in (1, 3):
        routes = table(WITH_BOTH, tokens_per_sequence=tokens_per_sequence)
        for n, unsure, tokens in product(range(1, 8), (False, True), range(1, TOKENS + 1)):
            batch_size = -(-tokens // tokens_per_sequence)
            expected = next(
                rule.variant
                for rule in WITH_BOTH.rules
                if rule.matches("decode", tokens, batch_size, Moment(n, unsure))
            )
            assert routes.lookup("decode", tokens, Moment(n, unsure)).name == expected


def test_moments_are_those_that_the_rules_tell_apart():
    assert [span.name for span in FLOORED.spans("decode")] == ["since_prompt 1-16", "since_prompt 17+"]
    routes = table(WITH_BOTH)
    assert [span.name for span in routes.spans("decode")] == [
        "since_prompt 1-2, sure",
        "since_prompt 1-2, unsure",
        "since_prompt 3-4, sure",
        "since_prompt 3-4, unsure",
        "since_prompt 5+, sure",
        "since_prompt 5+, unsure",
    ]
    for number, span in enumerate(routes.spans("decode")):
        assert routes.moment_name("decode", span.moment) == span.name
        assert span.is_calm == (number == 4)
    assert routes.moment_name("decode", CALM) == "since_prompt 5+, sure"
    assert Span(5, 5, True).name == "since_prompt 5, unsure"


def test_other_phases_have_one_moment():
    routes = table(WITH_BOTH)
    for phase in ("prefill", "mixed"):
        assert routes.spans(phase) == (Span(),)
        assert routes.lookup(phase, 9, Moment(0, False)) == routes.lookup(phase, 9)
        assert routes.moment_name(phase, Moment(0, False)) == ""


@pytest.mark.parametrize("name", ["phase-batch-layer", "w8a8"])
def test_a_policy_without_such_rules_tells_none_apart(name):
    routes = build_route_table(load_policy(name), VARIANTS, num_layers=30, max_tokens=TOKENS)
    assert not routes.has_moments
    assert routes.spans("decode") == (Span(),)
    assert routes.moment_name("decode", CALM) == ""
    assert routes.intervals("decode", Moment(1, True)) == routes.intervals("decode")


def test_a_size_can_take_the_plans_of_all_its_moments():
    routes = table(WITH_BOTH)
    assert {plan.name for plan in routes.reachable(1)} == {"w4a16", "fp8"}
    assert {plan.name for plan in routes.reachable(3)} == {"w8a8", "w4a16", "fp8"}
    same = policy(decode("w8a8", since_prompt={"max": 2}), {"use": "w8a8"})
    assert table(same).ignores_phase()
    assert not table(policy(decode("w4a16", since_prompt={"max": 2}), {"use": "w8a8"})).ignores_phase()


def test_a_rule_of_all_moments_is_reached_only_where_one_is_left():
    for states in ([True, False], [False, True]):
        first, second = (decode("w4a16", unsure=state) for state in states)
        with pytest.raises(FlexQuantError, match=r"rules\[2\] can never match"):
            policy(first, second, decode("fp8"), {"use": "w8a8"}, experimental=TRIGGER)
        policy(first, decode("fp8"), {"use": "w8a8"}, experimental=TRIGGER)


def draw_rule(draw: random.Random) -> dict[str, Any]:
    """Draw a rule for decode whose ranges end at 4."""
    asked: dict[str, Any] = {}
    for key in draw.sample(["tokens", "batch_size", "since_prompt"], draw.randint(1, 3)):
        low, high = sorted(draw.randint(1, 4) for _ in range(2))
        asked[key] = draw.choice([{"min": low}, {"max": high}, {"min": low, "max": high}])
    if draw.random() < 0.5:
        asked["unsure"] = draw.random() < 0.5
    return decode("w8a8", **asked)


def rule_alone(entry: dict[str, Any]) -> Rule:
    others = {"experimental": TRIGGER} if "unsure" in entry["when"] else {}
    return policy(entry, {"use": "w8a8"}, **others).rules[0]


def test_unreachable_rules_are_those_that_no_pass_reaches():
    """A look at every pass says the same, for rules drawn at random."""
    draw, refused = random.Random(5), 0
    passes = [
        (tokens, batch, Moment(n, unsure))
        for tokens, batch, n, unsure in product(*3 * [range(1, 6)], (False, True))
    ]
    for _ in range(200):
        entries = [decode("w8a8", unsure=True, tokens={"min": 5})]
        entries += [draw_rule(draw) for _ in range(draw.randint(2, 9))]
        left, unreachable = passes, None
        for number, rule in enumerate(map(rule_alone, entries)):
            before, left = left, [one for one in left if not rule.matches("decode", *one)]
            if unreachable is None and len(left) == len(before):
                unreachable = number
        if unreachable is None:
            policy(*entries, {"use": "w8a8"}, experimental=TRIGGER)
        else:
            refused += 1
            with pytest.raises(FlexQuantError, match=rf"rules\[{unreachable}\] can never match"):
                policy(*entries, {"use": "w8a8"}, experimental=TRIGGER)
    assert 20 < refused < 180


@pytest.mark.parametrize(
    ("before", "after"), list(product([FLOORED, WITH_BOTH, load_policy("phase-batch")], repeat=2))
)
def test_every_pass_that_another_policy_changes_is_told_with_its_moment(before, after):
    old, new = table(before), table(after)
    told = {}
    for change in route_changes(old, new):
        for tokens in range(change.min_tokens, change.max_tokens + 1):
            told[change.phase, tokens, change.moment] = change.before, change.after
    names = {name for _, _, name in told}
    assert names <= {""} or old.has_moments or new.has_moments
    for phase in PHASES:
        for n, unsure, tokens in product(range(1, 20), (False, True), range(1, TOKENS + 1)):
            plans = tuple(routes.lookup(phase, tokens, Moment(n, unsure)).name for routes in (old, new))
            found = [told.get((phase, tokens, name)) for name in names if holds(name, n, unsure)]
            assert [pair for pair in found if pair] == ([plans] if plans[0] != plans[1] else [])


def holds(name: str, since_prompt: int, unsure: bool) -> bool:
    """Return whether a span has this moment, by the moment's name."""
    for part in filter(None, name.split(", ")):
        if part in ("sure", "unsure"):
            if unsure != (part == "unsure"):
                return False
        else:
            first, _, last = part.removeprefix("since_prompt ").rstrip("+").partition("-")
            end = since_prompt if part.endswith("+") else int(last or first)
            if not int(first) <= since_prompt <= end:
                return False
    return True


def test_decode_passes_are_counted_from_the_last_prompt():
    passes = [("prefill", True), ("decode", False), ("decode", False), ("mixed", True), ("decode", False)]
    passes += [("decode", True), ("decode", False), ("prefill", True), ("prefill", True), ("decode", False)]
    found = [0]
    for phase, holds_prompt in passes:
        found.append(count_since_prompt(found[-1], phase, holds_prompt))
    assert found[1:] == [0, 1, 2, 0, 1, 1, 2, 0, 0, 1]


def test_matching_rules_are_those_of_a_moment():
    first, calm = (
        [rule.variant for _, _, rule in matching_rules(FLOORED, "decode", TOKENS, moment=moment)]
        for moment in (Moment(1, False), CALM)
    )
    assert (first, calm) == (["w8a8"], ["w4a16"])


def test_show_has_a_row_for_each_moment(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "SUBCOMMANDS", ("policy",))
    (tmp_path / "floor.yaml").write_text(FLOOR)
    assert cli.main(["policy", "show", str(tmp_path / "floor.yaml"), "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "phase     forward pass of         moment            plan",
        "prefill   1 or more tokens        any               w8a8",
        "decode    1 or more sequences     since_prompt 1-3  w8a8",
        "decode    1 or more sequences     since_prompt 4+   w4a16",
        "mixed     1 or more tokens        any               w8a8",
    ]
    assert [route.get("moment") for route in json.loads(last)["routes"]] == [
        None,
        "since_prompt 1-3",
        "since_prompt 4+",
        None,
    ]


def test_show_says_when_passes_are_unsure(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "SUBCOMMANDS", ("policy",))
    (tmp_path / "p.yaml").write_text(json.dumps(WITH_BOTH.document))
    assert cli.main(["policy", "show", str(tmp_path / "p.yaml")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "unsure: decode passes from entropy (max) of at least 2 until below 1, either for at least 4 of them"
    )
