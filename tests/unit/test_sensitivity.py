# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""From KL divergences by row, written by hand, to what each layer costs and wins."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flexquant.sensitivity.report import estimate, format_table, layer_effects

DOCUMENT = {
    "checkpoint": "m",
    "reference": "r",
    "higher": "w8a8",
    "lower": "w4a16",
    "layers": 2,
    "kl": {
        "w8a8": [0.1, 0.3],
        "w4a16": [1.0, 2.0],
        "lowered 0": [0.2, 0.5],
        "lowered 1": [0.1, 0.3],
        "raised 0": [0.9, 1.7],
        "raised 1": [0.5, 1.0],
    },
}


def test_differences_are_taken_row_by_row() -> None:
    first, second = layer_effects(DOCUMENT)
    assert first.costs.mean == pytest.approx(0.15) and second.costs.mean == 0
    assert first.wins.mean == pytest.approx(0.2) and second.wins.mean == pytest.approx(0.75)
    assert first.costs.low == pytest.approx(0.1) and first.costs.high == pytest.approx(0.2)


def test_the_layer_that_wins_most_comes_first() -> None:
    rows = [line.split(" | ")[0] for line in format_table(DOCUMENT).splitlines() if line[2:3].isdecimal()]
    assert rows == ["| 1", "| 0"]


def test_the_interval_is_that_of_the_mean() -> None:
    values = np.random.default_rng(1).normal(3, 1, size=400)
    found = estimate(values)
    half = 1.96 * values.std() / math.sqrt(400)
    assert found.low == pytest.approx(values.mean() - half, abs=0.01)
    assert found.high == pytest.approx(values.mean() + half, abs=0.01)


def test_one_row_has_no_interval() -> None:
    assert (estimate([2.0]).low, estimate([2.0]).high) == (-math.inf, math.inf)
