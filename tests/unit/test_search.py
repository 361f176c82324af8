# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Which plans a search proposes, which of the measured ones it chooses, and whole searches over results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from flexquant.checkpoint.served_config import read_merged_config
from flexquant.errors import FlexQuantError, UsageError
from flexquant.evaluation.inputs import Settings, Subject
from flexquant.layers.quality_limit import limit_loss
from flexquant.layers.search_report import searched_policy_document
from flexquant.layers.searching import (
    Budget,
    MeasuredPlan,
    Search,
    SearchResult,
    beside,
    front,
    greedy_chain,
)
from flexquant.layers.sensitivity import Study
from flexquant.merge import merge_checkpoints
from flexquant.policy.plans import Layers, describe_layers
from flexquant.policy.rules import parse_policy
from flexquant.policy.schema import SCHEMA
from flexquant.tuning.candidates import find_variants
from flexquant.tuning.policy_file import TuningResult
from flexquant.tuning.size_thresholds import Decision, Range
from tests.checkpoints import make_checkpoint
from tests.pass_times import CROSSED, make_times

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


# whole searches, over a file that holds the results of all plans: no engine starts

LAYERS = 4
COSTS = (0.01, 0.08, 0.04, 0.02)
"""Cost of each layer in W4A16; costs of several layers add up, but the first two together cost double."""
TIMES = make_times(CROSSED)
"""Pass times: a decode pass takes 10 ms in W8A8 and 4 ms in W4A16."""


def kl(plan: Layers) -> float:
    lost = sum(cost for cost, variant in zip(COSTS, plan, strict=True) if variant == "w4a16")
    return 0.001 + lost * (2 if plan[:2] == ("w4a16", "w4a16") else 1)


def plan(text: str) -> Layers:
    """Return the plan of one letter a layer: ``H`` for W8A8."""
    return tuple("w8a8" if letter == "H" else "w4a16" for letter in text)


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("searching")
    names = ("w8a8", "w4a16")
    sources = {name: make_checkpoint(folder / name, scheme=name, num_layers=LAYERS) for name in names}
    merge_checkpoints(sources, folder / "merged")
    return folder / "merged"


@pytest.fixture
def study(merged: Path, tmp_path: Path) -> Study:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    variants = find_variants(read_merged_config(merged)[0], None)
    settings = Settings(batch_sizes=(2,), samples=2, prompt_tokens=8, tokens=4)
    return Study.of(Subject.open(merged), variants, tmp_path / "text.txt", None, settings)


@pytest.fixture
def file(study: Study, tmp_path: Path) -> Path:
    """Return a file with the results of all plans."""
    rows = {describe_layers(p): [kl(p)] * 2 for p in product(("w8a8", "w4a16"), repeat=LAYERS)}
    (tmp_path / "sensitivity.json").write_text(json.dumps({**study.described(), "kl": rows}))
    return tmp_path / "sensitivity.json"


@pytest.fixture
def search(study: Study, file: Path) -> Callable[..., SearchResult]:
    def run(budget: Budget, **options: bool) -> SearchResult:
        made = Search(study, TIMES, budget, **options)
        return made.run(file, overwrite=False, progress=lambda message: None)

    return run


def test_a_loss_is_kept_to_with_as_few_raised_layers_as_the_chain_needs(
    search: Callable[..., SearchResult],
) -> None:
    assert search(Budget(max_kl=0.04)).chosen.layers == plan("LHHL")
    assert search(Budget(max_kl=1.0)).chosen.layers == plan("LLLL")
    assert search(Budget(max_kl=0.001)).chosen.layers == plan("HHHH")


def test_plans_beside_the_one_that_keeps_to_the_loss_are_measured_too(
    search: Callable[..., SearchResult],
) -> None:
    searched = {found.layers for found in search(Budget(max_kl=0.04)).searched}
    assert {plan("LHLL"), plan("LHHL"), plan("LHHH")} <= searched


def test_a_slowdown_is_one_above_the_fastest_variant(search: Callable[..., SearchResult]) -> None:
    # Each raised layer adds 1.5 ms to the 4 ms of a pass in W4A16.
    assert search(Budget(max_slowdown=0.8)).chosen.layers == plan("LHHL")
    assert search(Budget(max_slowdown=0)).chosen.layers == plan("LLLL")


def test_what_the_chosen_plan_is_compared_with_raises_as_many_layers(
    search: Callable[..., SearchResult],
) -> None:
    found = search(Budget(layers=3), compare=True)
    assert {name: found.others[name].layers for name in ("first", "last", "first and last")} == {
        "first": plan("HHHL"),
        "last": plan("LHHH"),
        "first and last": plan("HHLH"),
    }
    assert all(other.layers.count("w8a8") == 3 for other in found.others.values())


def test_of_two_plans_as_good_the_slower_one_is_not_on_the_front() -> None:
    fast, slow = MeasuredPlan(plan("LH"), 0.1, 0.02), MeasuredPlan(plan("HH"), 0.1, 0.03)
    assert front([slow, fast]) == [fast]


def test_prompts_keep_the_most_precise_variant_where_a_tuned_policy_loses_too_much(
    study: Study, file: Path
) -> None:
    rules = [{"when": {"phase": "decode"}, "use": "w4a16"}, {"use": "w4a16"}]
    decision = Decision({phase: (Range(None, "w4a16", None),) for phase in ("decode", "prefill")})
    tuned = TuningResult({"schema": SCHEMA, "description": "tuned", "rules": rules}, decision, TIMES, [])
    limited = limit_loss(tuned, study, 0.04, file, overwrite=False, progress=lambda message: None)
    decode, others = limited.document["rules"]
    assert decode["use"] == {"default": "w4a16", "layers": {"1-2": "w8a8"}}
    assert others["use"] == "w8a8"


@pytest.mark.parametrize("changed", ["files", "settings", "variants"])
def test_results_of_another_study_are_not_gone_on_with(
    study: Study, file: Path, tmp_path: Path, changed: str
) -> None:
    if changed == "files":
        sources = {
            name: make_checkpoint(tmp_path / name, scheme=name, num_layers=LAYERS, tie_word_embeddings=True)
            for name in study.variants
        }
        merge_checkpoints(sources, tmp_path / "merged")
        study = replace(study, subject=Subject.open(tmp_path / "merged"))
    elif changed == "settings":
        study = replace(study, settings=replace(study.settings, seed=3))
    else:
        study = replace(study, variants=dict(reversed(study.variants.items())))
    with pytest.raises(UsageError, match=f"has results with other {changed}; give another --output"):
        Search(study, TIMES, Budget(layers=1)).run(file, overwrite=False, progress=print)


def test_times_of_every_variant_are_needed(study: Study) -> None:
    times = make_times({"w8a8": CROSSED["w8a8"]})
    with pytest.raises(FlexQuantError, match="has times of w8a8, not of w4a16"):
        Search(study, times, Budget(layers=1))
