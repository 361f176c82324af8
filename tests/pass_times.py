# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Made-up times of passes."""

from collections.abc import Mapping

from flexquant.policy.pass_times import PassTimes, Time

# Seconds of decode by sequences, and of prefill by tokens: W8A8 is quick in prefill, W4A16 in decode.
CROSSED = {"w8a8": ({1: 0.010}, {1: 0.001}), "w4a16": ({1: 0.004}, {1: 0.003})}


def make_times(curves: Mapping[str, tuple[Mapping[int, float], Mapping[int, float]]]) -> PassTimes:
    """Return pass times without spread; ``curves``: variant -> seconds of decode and of prefill by size."""

    def times(side: int) -> dict[str, dict[int, Time]]:
        return {
            name: {size: Time(s, s, s) for size, s in pair[side].items()} for name, pair in curves.items()
        }

    decode, prefill = times(0), times(1)
    return PassTimes.model_construct(decode=decode, prefill=prefill, context=1, origin={"machine": "made up"})
