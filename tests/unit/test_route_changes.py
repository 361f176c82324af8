# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The passes to which another policy gives another plan, against a look at every pass."""

from __future__ import annotations

from itertools import product

import pytest

from flexquant.policy.routes import RouteTable, build_route_table, route_changes
from flexquant.policy.rules import builtin_policies, load_policy, parse_policy
from flexquant.policy.schema import PHASES

TOKENS = 96


def table(name: str) -> RouteTable:
    return build_route_table(
        load_policy(name), ["w8a8", "w4a16", "fp8"], 6, TOKENS, max_decode_tokens=64, tokens_per_sequence=1
    )


@pytest.mark.parametrize(("before", "after"), list(product(builtin_policies(), repeat=2)))
def test_every_pass_that_changes_is_told_and_no_other(before: str, after: str) -> None:
    old, new = table(before), table(after)
    told = {
        (change.phase, tokens): (change.before, change.after)
        for change in route_changes(old, new)
        for tokens in range(change.min_tokens, change.max_tokens + 1)
    }
    expected = {}
    for phase in PHASES:
        for tokens in range(1, old.intervals(phase)[-1].max_tokens + 1):
            plans = old.lookup(phase, tokens).name, new.lookup(phase, tokens).name
            if plans[0] != plans[1]:
                expected[phase, tokens] = plans
    assert told == expected


def test_neighbouring_passes_are_told_together() -> None:
    def policy(most: int) -> RouteTable:
        document = {
            "schema": "flexquant.policy/v1",
            "rules": [{"when": {"phase": "decode", "batch_size": {"max": most}}, "use": "a"}, {"use": "b"}],
        }
        return build_route_table(parse_policy(document), ["a", "b"], 2, 50)

    assert route_changes(policy(8), policy(20)) == [("decode", 9, 20, "b", "a")]
    assert route_changes(policy(8), policy(8)) == []
