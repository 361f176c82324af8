# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""From KL divergences by row, written by hand, to what each layer costs and wins."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flexquant.layers.report import Estimate, costs, estimate, format_sensitivity_table, wins
from flexquant.policy.plans import Layers, Plan, describe_layers, with_layer
from flexquant.policy.rules import parse_policy

HIGH, MIDDLE, LOW = "w8a8", "w4a8", "w4a16"
KL = {
    (HIGH, HIGH): [0.1, 0.3],
    (LOW, LOW): [1.0, 2.0],
    (LOW, HIGH): [0.2, 0.5],
    (HIGH, LOW): [0.1, 0.3],
}
DOCUMENT = {
    "checkpoint": "m",
    "reference": "r",
    "variants": [HIGH, LOW],
    "layers": 2,
    "kl": {describe_layers(layers): rows for layers, rows in KL.items()},
}


def test_differences_are_taken_row_by_row() -> None:
    first, second = (costs(DOCUMENT, layer, LOW) for layer in (0, 1))
    assert first.mean == pytest.approx(0.15) and second.mean == 0
    assert first.low == pytest.approx(0.1) and first.high == pytest.approx(0.2)
    won = [wins(DOCUMENT, layer, HIGH).mean for layer in (0, 1)]
    assert won == pytest.approx([1.3, 1.15])


def test_the_layer_that_wins_most_comes_first() -> None:
    rows = [
        line.split(" | ")[0]
        for line in format_sensitivity_table(DOCUMENT).splitlines()
        if line[2:3].isdecimal()
    ]
    assert rows == ["| 0", "| 1"]


def test_the_interval_is_that_of_the_mean() -> None:
    values = np.random.default_rng(1).normal(3, 1, size=400)
    found = estimate(values)
    half = 1.96 * values.std() / math.sqrt(400)
    assert found.low == pytest.approx(values.mean() - half, abs=0.01)
    assert found.high == pytest.approx(values.mean() + half, abs=0.01)


def test_an_interval_by_hand() -> None:
    """Three rows drawn from 0, 0 and 3 are all 0 in 8 of 27 draws, and all 3 in one, which is 3.7 %."""
    assert estimate([0.0, 0.0, 3.0]) == Estimate(1.0, 0.0, 3.0)


def test_one_row_has_no_interval() -> None:
    assert (estimate([2.0]).low, estimate([2.0]).high) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ((HIGH,) * 3, "w8a8 0-2"),
        ((HIGH, LOW, LOW), "w8a8 0, w4a16 1-2"),
        ((LOW, HIGH, MIDDLE, MIDDLE, LOW), "w4a16 0, w8a8 1, w4a8 2-3, w4a16 4"),
    ],
)
def test_a_plan_is_told_by_its_runs(layers: Layers, text: str) -> None:
    assert describe_layers(layers) == text


@pytest.mark.parametrize(
    "layers", [(HIGH,) * 3, (LOW, HIGH, LOW, LOW), (LOW, HIGH, HIGH, MIDDLE, LOW, LOW, HIGH, LOW)]
)
def test_a_policy_reads_back_the_plan_that_was_written(layers: Layers) -> None:
    document = {
        "schema": "flexquant.policy/v1",
        "derive": {MIDDLE: {"from": LOW, "activations": "int8"}},
        "rules": [{"use": Plan.from_layers(layers).rule_use()}],
    }
    if MIDDLE not in layers:
        del document["derive"]
    (rule,) = parse_policy(document, "the plan").rules
    found = (rule.variant,) * len(layers)
    for run in rule.layers:
        for layer in range(run.first, run.last + 1):
            found = with_layer(found, layer, run.variant)
    assert found == layers
