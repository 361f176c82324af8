# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Benchmarks that switch a part of FlexQuant on and off in one engine: both ways are timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import own_cost, switching, watching
from flexquant.measuring.comparison import Effort

pytestmark = [pytest.mark.engine, pytest.mark.full]

ONE_ROUND = Effort(1, 1, 1.0)


@pytest.mark.parametrize(
    "measure",
    [
        lambda folder: own_cost.measure(folder, "w4a16", ONE_ROUND),
        lambda folder: watching.measure_worker(folder, ONE_ROUND),
        lambda folder: switching.measure(folder, ("w8a8", "w4a16"), ONE_ROUND),
    ],
    ids=["own_cost", "watching", "switching"],
)
def test_a_round_has_times_of_both(measure: Callable[[Any], dict[str, Any]], tiny_merged: Any) -> None:
    found = measure(tiny_merged("llama") / "merged")
    (on,), (off,) = found["on_seconds"], found["off_seconds"]
    assert found["ratio"] == pytest.approx(on / off, rel=1e-3)
