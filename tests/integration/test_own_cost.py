# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The benchmark that switches FlexQuant on and off in one engine: both ways are timed."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import own_cost
from flexquant.measuring.comparison import Effort

pytestmark = [pytest.mark.engine, pytest.mark.full]


def test_a_round_has_times_of_both(tiny_merged: Any) -> None:
    found = own_cost.measure(tiny_merged("llama") / "merged", "w4a16", Effort(1, 1, 1.0))
    (on,), (off,) = found["on_seconds"], found["off_seconds"]
    assert found["ratio"] == pytest.approx(on / off, rel=1e-3)
