# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A whole search over what a file of results holds already, for which no engine starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from flexquant.checkpoint.served_config import read_merged_config
from flexquant.errors import FlexQuantError, UsageError
from flexquant.evaluation.inputs import Settings, Subject
from flexquant.layers.quality_limit import limit_loss
from flexquant.layers.searching import Budget, MeasuredPlan, Search, SearchResult, front
from flexquant.layers.sensitivity import Study
from flexquant.merge import merge_checkpoints
from flexquant.policy.plans import Layers, describe_layers
from flexquant.policy.schema import SCHEMA
from flexquant.tuning.candidates import find_variants
from flexquant.tuning.policy_file import TuningResult
from flexquant.tuning.size_thresholds import Decision, Range
from tests.checkpoints import make_checkpoint
from tests.pass_times import CROSSED, make_times

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
    decision = Decision({phase: (Range(1, None, "w4a16", None),) for phase in ("decode", "prefill")})
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
