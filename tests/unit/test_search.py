# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Which plans a search proposes, and which of the measured ones it chooses."""

from __future__ import annotations

from typing import Any

import pytest

from flexquant.errors import FlexQuantError, UsageError
from flexquant.layers.search_report import searched_policy_document
from flexquant.layers.searching import Budget, MeasuredPlan, SearchResult, beside, front, greedy_chain
from flexquant.policy.rules import parse_policy
from flexquant.policy.schema import SCHEMA

HIGH, MIDDLE, LOW = "w8a8", "w4a8", "w4a16"
SECONDS = {HIGH: 0.03, LOW: 0.02}


def test_the_chain_raises_the_layer_that_costs_most_first() -> None:
    costs = [0.1, 0.4, 0.2]
    chain = greedy_chain(lambda layer, variant: costs[layer], SECONDS, 3)
    assert chain == [
        (LOW, LOW, LOW),
        (LOW, HIGH, LOW),
        (LOW, HIGH, HIGH),
        (HIGH, HIGH, HIGH),
    ]


def test_of_three_variants_a_layer_takes_what_wins_most_for_its_time() -> None:
    # w4a8 wins half of what w8a8 wins for a tenth of its time; the second layer wins only in w8a8.
    costs = {(0, LOW): 0.2, (0, MIDDLE): 0.1, (1, LOW): 0.6, (1, MIDDLE): 0.6}
    chain = greedy_chain(
        lambda layer, variant: costs[layer, variant], {HIGH: 0.03, MIDDLE: 0.021, LOW: 0.02}, 2
    )
    assert chain == [(LOW, LOW), (MIDDLE, LOW), (MIDDLE, HIGH), (HIGH, HIGH)]


def test_steps_that_lose_come_last() -> None:
    costs = [-0.1, 0.4, -0.2]
    chain = greedy_chain(lambda layer, variant: costs[layer], SECONDS, 3)
    assert chain[1:] == [(LOW, HIGH, LOW), (HIGH, HIGH, LOW), (HIGH, HIGH, HIGH)]


def test_a_step_that_saves_time_and_wins_comes_before_all_others() -> None:
    costs = {(0, LOW): 9.0, (0, MIDDLE): 8.9}
    chain = greedy_chain(
        lambda layer, variant: costs[layer, variant], {HIGH: 0.03, MIDDLE: 0.01, LOW: 0.02}, 1
    )
    assert chain == [(LOW,), (MIDDLE,), (HIGH,)]


def test_layers_that_are_raised_next_are_tried_in_place_of_the_last() -> None:
    chain = greedy_chain(lambda layer, variant: [0.1, 0.4, 0.2, 0.3][layer], SECONDS, 4)
    assert [*beside(chain, (LOW, HIGH, LOW, HIGH), 2)] == [(LOW, HIGH, HIGH, LOW), (HIGH, HIGH, LOW, LOW)]
    assert [*beside(chain, chain[0], 1)] == [(LOW, HIGH, LOW, LOW)]
    assert [*beside(chain, chain[-1], 2)] == []


PLANS = [
    MeasuredPlan((LOW, LOW), 0.5, 0.020),
    MeasuredPlan((LOW, HIGH), 0.2, 0.025),
    MeasuredPlan((HIGH, LOW), 0.3, 0.025),
    MeasuredPlan((HIGH, HIGH), 0.01, 0.030),
]


@pytest.mark.parametrize(
    ("budget", "layers"),
    [
        (Budget(max_kl=0.5), (LOW, LOW)),
        (Budget(max_kl=0.25), (LOW, HIGH)),
        (Budget(max_kl=0.01), (HIGH, HIGH)),
    ],
)
def test_the_fastest_plan_within_the_loss_is_chosen(budget: Budget, layers: tuple[str, ...]) -> None:
    assert budget.choose(PLANS).layers == layers


def test_a_budget_that_nothing_meets_names_the_nearest() -> None:
    message = r"no plan loses at most 0.005 nats a token; the nearest, w8a8 0-1, loses 0.01: allow that"
    with pytest.raises(FlexQuantError, match=message):
        Budget(max_kl=0.005).choose(PLANS)


@pytest.mark.parametrize(
    ("budget", "raised", "slowdown", "is_allowed"),
    [
        (Budget(max_slowdown=0.3), 9, 0.3, True),
        (Budget(max_slowdown=0.3), 1, 0.31, False),
        (Budget(layers=2), 2, 9.0, True),
        (Budget(layers=2), 1, 0.0, False),
        (Budget(max_kl=0.0), 9, 9.0, True),
    ],
)
def test_what_keeps_to_time_and_layers_is_known_before_it_is_measured(
    budget: Budget, raised: int, slowdown: float, is_allowed: bool
) -> None:
    assert budget.allows(raised, slowdown) is is_allowed


@pytest.mark.parametrize("values", [{}, {"max_kl": 0.1, "layers": 2}, {"max_kl": -0.1}])
def test_one_budget_of_at_least_nothing_is_given(values: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Budget(**values)


def test_more_layers_than_the_model_has_are_refused() -> None:
    with pytest.raises(UsageError, match="the model has 2 layers, not 3"):
        Budget(layers=3).check_layers(2)


def test_what_is_slower_and_worse_is_not_on_the_front() -> None:
    assert [plan.layers for plan in front(PLANS)] == [(LOW, LOW), (LOW, HIGH), (HIGH, HIGH)]


PREFILL = {"when": {"phase": ["prefill", "mixed"]}, "use": HIGH}
SMALL, LARGE = ({"when": {"phase": "decode", "batch_size": {"max": n}}, "use": LOW} for n in (4, 64))
SEARCHED = {"default": HIGH, "layers": {"0": LOW}}


@pytest.mark.parametrize(
    ("rules", "sequences", "expected"),
    [
        ([PREFILL, SMALL, {"use": HIGH}], 1, [PREFILL, {**SMALL, "use": SEARCHED}, {"use": HIGH}]),
        (
            [PREFILL, SMALL, LARGE, {"use": HIGH}],
            8,
            [PREFILL, SMALL, {**LARGE, "use": SEARCHED}, {"use": HIGH}],
        ),
        ([{"use": HIGH}], 1, [{"when": {"phase": "decode"}, "use": SEARCHED}, {"use": HIGH}]),
        (
            [{"when": {"tokens": {"max": 8}}, "use": LOW}, {"use": HIGH}],
            1,
            [
                {"when": {"tokens": {"max": 8}, "phase": "decode"}, "use": SEARCHED},
                {"when": {"tokens": {"max": 8}}, "use": LOW},
                {"use": HIGH},
            ],
        ),
    ],
)
def test_the_plan_takes_the_decode_passes_of_the_rule_for_so_many_sequences(
    rules: list[dict[str, Any]], sequences: int, expected: list[dict[str, Any]]
) -> None:
    base = parse_policy({"schema": SCHEMA, "rules": rules}, "the policy")
    found = SearchResult({}, MeasuredPlan((LOW, HIGH, HIGH), 0.1, 0.02), [], {})
    document = searched_policy_document(base, found, {HIGH: base, LOW: base}, Budget(layers=2), sequences)
    assert document["rules"] == expected
