# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The arithmetic of the benchmarks of decoding: patterns of raised passes, and what a plan wins back."""

from __future__ import annotations

import pytest

from benchmarks.decode_quality_tables import won_back
from benchmarks.trigger import at_random, evenly


@pytest.mark.parametrize(("raised", "passes"), [(0, 5), (2, 8), (5, 5), (3, 7)])
def test_patterns_raise_as_many_as_they_should(raised: int, passes: int) -> None:
    for pattern in (evenly(raised, passes), at_random(raised, passes, 0)):
        assert (len(pattern), pattern.count("1")) == (passes, raised)


def test_even_patterns_have_equal_gaps() -> None:
    assert evenly(2, 8) == "00010001"


def test_what_a_plan_wins_back() -> None:
    lowest, highest = [0.4, 0.6, 0.5], [0.1, 0.3, 0.2]
    assert won_back(highest, lowest, highest) == pytest.approx((1, 1, 1))
    assert won_back(lowest, lowest, highest) == pytest.approx((0, 0, 0))
    share, low, high = won_back([0.1, 0.6, 0.2], lowest, highest)
    assert share == pytest.approx(2 / 3)
    assert low == pytest.approx(0) and high == pytest.approx(1)
