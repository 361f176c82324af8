# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Which plans a search proposes and chooses, whole searches over results, and what each layer costs."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexquant.checkpoint.merged_config import read_merged_config
from flexquant.cli import main
from flexquant.errors import FlexQuantError, UsageError
from flexquant.evaluation.inputs import Settings, Subject
from flexquant.layers import report, searching
from flexquant.layers.report import Estimate, estimate, format_sensitivity_table, searched_policy_document
from flexquant.layers.searching import Budget, MeasuredPlan, Search, SearchResult, beside, greedy_chain
from flexquant.layers.sensitivity import Study
from flexquant.merge import merge_checkpoints
from flexquant.policy.plans import Layers, Plan, describe_layers
from flexquant.policy.routes import build_route_table
from flexquant.policy.rules import parse_policy
from flexquant.policy.schema import SCHEMA
from flexquant.tuning.candidates import find_variants
from flexquant.tuning.objectives import Decision, Range
from flexquant.tuning.policy_file import TuningResult, policy_text, unused_notes
from tests.checkpoints import make_pair
from tests.pass_times import CROSSED, make_times

HIGH, MIDDLE, LOW = "w8a8", "w4a8", "w4a16"
SECONDS = {HIGH: 0.03, LOW: 0.02}


def plan(text: str) -> Layers:
    """Return the plan of one letter a layer: ``H`` for W8A8, ``M`` for W4A8, ``L`` for W4A16."""
    return tuple({"H": HIGH, "M": MIDDLE, "L": LOW}[letter] for letter in text)


@pytest.mark.parametrize(
    ("costs", "chain"),
    [
        # The layer that costs most is raised first, and steps that lose come last.
        ([0.1, 0.4, 0.2], ["LLL", "LHL", "LHH", "HHH"]),
        ([-0.1, 0.4, -0.2], ["LLL", "LHL", "HHL", "HHH"]),
    ],
)
def test_the_chain_raises_one_layer_after_another(costs, chain):
    assert greedy_chain(lambda layer, variant: costs[layer], SECONDS, 3) == [plan(text) for text in chain]


@pytest.mark.parametrize(
    ("costs", "middle_seconds", "chain"),
    [
        # w4a8 wins half of what w8a8 wins for a tenth of its time; the second layer wins only in w8a8.
        ({(0, LOW): 0.2, (0, MIDDLE): 0.1, (1, LOW): 0.6, (1, MIDDLE): 0.6}, 0.021, ["LL", "ML", "MH", "HH"]),
        # A step that saves time and wins comes before all others.
        ({(0, LOW): 9.0, (0, MIDDLE): 8.9}, 0.01, ["L", "M", "H"]),
    ],
)
def test_of_three_variants_a_layer_takes_what_wins_most_for_its_time(costs, middle_seconds, chain):
    seconds = {HIGH: 0.03, MIDDLE: middle_seconds, LOW: 0.02}
    found = greedy_chain(lambda layer, variant: costs[layer, variant], seconds, len(chain[0]))
    assert found == [plan(text) for text in chain]


def test_layers_that_are_raised_next_are_tried_in_place_of_the_last():
    chain = greedy_chain(lambda layer, variant: [0.1, 0.4, 0.2, 0.3][layer], SECONDS, 4)
    assert [*beside(chain, plan("LHLH"), 2)] == [plan("LHHL"), plan("HHLL")]
    assert [*beside(chain, chain[0], 1)] == [plan("LHLL")] and [*beside(chain, chain[-1], 2)] == []


FOUND = ("LL", 0.5, 0.020), ("LH", 0.2, 0.025), ("HL", 0.3, 0.025), ("HH", 0.01, 0.030)
PLANS = [MeasuredPlan(plan(letters), kl, seconds) for letters, kl, seconds in FOUND]


@pytest.mark.parametrize(("max_kl", "layers"), [(0.5, "LL"), (0.25, "LH"), (0.01, "HH")])
def test_the_fastest_plan_within_the_loss_is_chosen(max_kl, layers):
    assert Budget(max_kl=max_kl).choose(PLANS).layers == plan(layers)


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
def test_what_keeps_to_time_and_layers_is_known_before_it_is_measured(budget, raised, slowdown, is_allowed):
    assert budget.allows(raised, slowdown) is is_allowed


def test_a_budget_is_at_least_nothing():
    with pytest.raises(UsageError, match="the budget is -0.1; give 0 or more"):
        Budget(max_kl=-0.1)


def test_what_is_slower_and_worse_is_not_on_the_front():
    assert [found.layers for found in searching.front(PLANS)] == [plan("LL"), plan("LH"), plan("HH")]
    fast, slow = MeasuredPlan(plan("LH"), 0.1, 0.02), MeasuredPlan(plan("HH"), 0.1, 0.03)
    assert searching.front([slow, fast]) == [fast], "of two plans as good"


PREFILL = {"when": {"phase": ["prefill", "mixed"]}, "use": HIGH}
SMALL, LARGE = ({"when": {"phase": "decode", "batch_size": {"max": n}}, "use": LOW} for n in (4, 64))
FEW = {"when": {"tokens": {"max": 8}}, "use": LOW}
SEARCHED = {"default": HIGH, "layers": {"0": LOW}}
FEW_IN_DECODE = {"when": {**FEW["when"], "phase": "decode"}, "use": SEARCHED}


@pytest.mark.parametrize(
    ("rules", "sequences", "expected"),
    [
        ([PREFILL, SMALL, {"use": HIGH}], 1, [PREFILL, {**SMALL, "use": SEARCHED}, {"use": HIGH}]),
        ([SMALL, LARGE, {"use": HIGH}], 8, [SMALL, {**LARGE, "use": SEARCHED}, {"use": HIGH}]),
        ([{"use": HIGH}], 1, [{"when": {"phase": "decode"}, "use": SEARCHED}, {"use": HIGH}]),
        ([FEW, {"use": HIGH}], 1, [FEW_IN_DECODE, FEW, {"use": HIGH}]),
    ],
)
def test_the_plan_takes_the_decode_passes_of_the_rule_for_so_many_sequences(rules, sequences, expected):
    base = parse_policy({"schema": SCHEMA, "rules": rules}, "the policy")
    found = SearchResult({}, MeasuredPlan((LOW, HIGH, HIGH), 0.1, 0.02), [])
    document = searched_policy_document(base, found, {HIGH: base, LOW: base}, Budget(layers=2), sequences)
    assert document["rules"] == expected


def test_a_derivation_that_no_rule_uses_any_more_goes():
    derive = {"other": {"from": LOW, "activations": "int8"}}
    rules = [{"when": {"phase": "decode"}, "use": "other"}, {"use": HIGH}]
    base = parse_policy({"schema": SCHEMA, "rules": rules, "derive": derive}, "the policy")
    found = SearchResult({}, MeasuredPlan((LOW, HIGH, HIGH), 0.1, 0.02), [])
    document = searched_policy_document(base, found, {}, Budget(layers=2), 1)
    assert "derive" not in document and document["rules"][0]["use"] == SEARCHED


# whole searches, over a file that holds the results of all plans: no engine starts
LAYERS = 4
COSTS = (0.01, 0.08, 0.04, 0.02)
"""Cost of each layer in W4A16; costs of several layers add up, but the first two together cost double."""
TIMES = make_times(CROSSED)
"""Pass times: a decode pass takes 10 ms in W8A8 and 4 ms in W4A16."""


def kl(plan: Layers) -> float:
    lost = sum(cost for cost, variant in zip(COSTS, plan, strict=True) if variant == "w4a16")
    return 0.001 + lost * (2 if plan[:2] == ("w4a16", "w4a16") else 1)


def merge(folder: Path, **options: Any) -> Path:
    merge_checkpoints(make_pair(folder, num_layers=LAYERS, **options), folder / "merged")
    return folder / "merged"


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merge(tmp_path_factory.mktemp("searching"))


@pytest.fixture
def study(merged: Path, tmp_path: Path) -> Study:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    variants = find_variants(read_merged_config(merged)[0], None)
    settings = Settings(batch_sizes=(2,), samples=2, prompt_tokens=8, tokens=4)
    return Study(Subject(merged), variants, tmp_path / "text.txt", None, settings)


@pytest.fixture
def file(study: Study, tmp_path: Path) -> Path:
    rows = {describe_layers(p): [kl(p)] * 2 for p in product(("w8a8", "w4a16"), repeat=LAYERS)}
    (tmp_path / "sensitivity.json").write_text(json.dumps({**study.described(), "kl": rows}))
    return tmp_path / "sensitivity.json"


@pytest.fixture
def search(study: Study, file: Path) -> Callable[..., SearchResult]:
    def run(budget: Budget) -> SearchResult:
        return Search(study, TIMES, budget).run(file, overwrite=False, progress=lambda message: None)

    return run


LEAVING = ["LHHH", "HLHH", "HHLH", "HHHL"]


@pytest.mark.parametrize(
    ("budget", "chosen", "searched"),
    [
        # A loss is kept to with as few raised layers as the chain needs; the plans beside are measured too.
        (Budget(max_kl=0.04), "LHHL", ["LHLL", "LHHL", *LEAVING]),
        (Budget(max_kl=0.08), "LHLL", ["LHLL", "LHHL", *LEAVING]),
        (Budget(max_kl=kl(plan("LHHL"))), "LHHL", ["LHLL", "LHHL", *LEAVING]),
        (Budget(max_kl=kl(plan("LLLL"))), "LLLL", []),
        (Budget(max_kl=0.001), "HHHH", LEAVING),
        # Each raised layer adds 1.5 ms to the 4 ms of a pass in W4A16.
        (Budget(max_slowdown=0.75), "LHHL", ["LHLL", "LHHL", "LHLH", "HHLL", *LEAVING]),
        (Budget(max_slowdown=0), "LLLL", LEAVING),
    ],
)
def test_the_plan_within_the_budget(search, budget, chosen, searched):
    """The variants alone are always measured."""
    found = search(budget)
    assert found.chosen.layers == plan(chosen)
    assert {one.layers for one in found.searched} == {plan(text) for text in ["HHHH", "LLLL", *searched]}


CHOSEN = Decision({phase: (Range(None, "w4a16", None),) for phase in ("decode", "prefill")})


MIXED = {"default": "w4a16", "layers": {"1-2": "w8a8"}}


@pytest.mark.parametrize(
    ("most", "rules", "plans"),
    [
        (0.04, [{"when": {"phase": "decode"}, "use": MIXED}, {"use": "w8a8"}], {"that plan", "w8a8"}),
        (kl(plan("LLLL")), [{"use": "w4a16"}], {"w4a16"}),
    ],
)
def test_a_tuned_policy_changes_only_where_it_loses_too_much(study, file, most, rules, plans):
    """Prompts then take the most precise variant, and so does the table of times."""
    notes = unused_notes({"w8a8": 2_000_000})
    document = {"schema": SCHEMA, "description": "tuned", "rules": [{"use": "w4a16"}]}
    tuned = TuningResult(document, CHOSEN, TIMES, notes)
    limited = searching.limit_loss(tuned, study, most, file, overwrite=False, progress=lambda message: None)
    assert limited.document["rules"] == rules and (notes[0] in limited.notes) == (len(rules) == 1)
    assert {*re.findall(r"^# \d+ (?:sequence|token).*  (.*)", policy_text(limited), re.MULTILINE)} == plans


@pytest.mark.parametrize("changed", ["files", "settings", "variants"])
def test_results_of_another_study_are_not_gone_on_with(study, file, tmp_path, changed):
    if changed == "files":
        study = replace(study, subject=Subject(merge(tmp_path, tie_word_embeddings=True)))
    elif changed == "settings":
        study = replace(study, settings=replace(study.settings, seed=3))
    else:
        study = replace(study, variants=dict(reversed(study.variants.items())))
    with pytest.raises(UsageError, match=f"has results with other {changed}(, rows)?; give another --output"):
        Search(study, TIMES, Budget(layers=1)).run(file, overwrite=False, progress=print)


@pytest.mark.parametrize(("given", "name"), [([], "phase-batch"), (["--policy", "phase"], "phase")])
def test_a_policy_without_times_is_refused(merged, tmp_path, capsys, given, name):
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    arguments = ["--text", str(tmp_path / "text.txt"), "--max-kl", "1", "--output", str(tmp_path / "out")]
    assert main(["search", str(merged), *arguments, *given]) == 2
    assert f"the policy '{name}' has no measured times" in capsys.readouterr().err


def test_times_of_every_variant_are_needed(study):
    times = make_times({"w8a8": CROSSED["w8a8"]})
    with pytest.raises(FlexQuantError, match="has times of w8a8, not of w4a16"):
        Search(study, times, Budget(layers=1))


# what a layer costs and wins, from KL divergences by row that are written by hand
KL = {"HH": [0.1, 0.3], "LL": [1.0, 2.0], "LH": [0.2, 0.5], "HL": [0.1, 0.3]}
DOCUMENT = {"checkpoint": "m", "reference": "r", "variants": [HIGH, LOW], "layers": 2}
DOCUMENT["kl"] = {describe_layers(plan(letters)): rows for letters, rows in KL.items()}


def test_differences_are_taken_row_by_row_and_the_layer_that_wins_most_comes_first():
    (_, (first, second)), (_, won) = report.effects(DOCUMENT)
    assert first.mean == pytest.approx(0.15) and second.mean == 0
    assert first.low == pytest.approx(0.1) and first.high == pytest.approx(0.2)
    assert [found.mean for found in won] == pytest.approx([1.3, 1.15])
    lines = format_sensitivity_table(DOCUMENT).splitlines()
    assert [line.split(" | ")[0] for line in lines if line[2:3].isdecimal()] == ["| 0", "| 1"]


def test_an_interval_by_hand_and_as_that_of_the_mean():
    """Three rows drawn from 0, 0 and 3 are all 0 in 8 of 27 draws, and all 3 in one, which is 3.7 %."""
    assert estimate([0.0, 0.0, 3.0]) == Estimate(1.0, 0.0, 3.0)
    assert estimate([2.0]) == Estimate(2.0, -math.inf, math.inf), "one row tells none"
    values = np.random.default_rng(1).normal(3, 1, size=400)
    found, half = estimate(values), 1.96 * values.std() / math.sqrt(400)
    assert [found.low, found.high] == pytest.approx([values.mean() - half, values.mean() + half], abs=0.01)


@pytest.mark.parametrize(
    ("letters", "text"),
    [
        ("HHH", "w8a8 0-2"),
        ("HLL", "w8a8 0, w4a16 1-2"),
        ("LHMML", "w4a16 0, w8a8 1, w4a8 2-3, w4a16 4"),
        ("LHHMLLHL", "w4a16 0, w8a8 1-2, w4a8 3, w4a16 4-5, w8a8 6, w4a16 7"),
    ],
)
def test_a_plan_is_told_by_its_runs_and_a_policy_reads_it_back(letters, text):
    layers = plan(letters)
    assert describe_layers(layers) == text
    document: dict[str, Any] = {"schema": SCHEMA, "rules": [{"use": Plan.from_layers(layers).rule_use()}]}
    if MIDDLE in layers:
        document["derive"] = {MIDDLE: {"from": LOW, "activations": "int8"}}
    table = build_route_table(parse_policy(document, "the plan"), (HIGH, LOW), len(layers), max_tokens=1)
    assert [found.layers for found in table.plans] == [layers]
