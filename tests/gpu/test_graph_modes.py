# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Compiled and captured, a constant policy is the static checkpoint, in every graph mode of both runners."""

import pytest

from tests.gpu.conftest import ON_GPU, RUNNERS, generate
from tests.policies import rules

MODES = [None, "NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL", "FULL_AND_PIECEWISE"]
LONG = "a prompt of several chunks and more tokens than the largest graph holds; " * 6
BATCHES = [["alone"], [f"prompt {i}" for i in range(3)], [LONG, *(f"{i} side by side" for i in range(19))]]


def the_last_every_day(*values):
    """Mark all but the last for test-full, unless there is a GPU.

    What a graph holds does not change with the kernels, and test_replays reads it in other modes.
    """
    *others, last = values
    return [*(pytest.param(value, marks=[] if ON_GPU else pytest.mark.full) for value in others), last]


# PyTorch's product of FP8 on a CPU takes minutes for what is generated here.
@pytest.mark.parametrize("variant", the_last_every_day("w4a16", *(["fp8"] if ON_GPU else []), "w8a8"))
@pytest.mark.parametrize("mode", the_last_every_day(*MODES))
@pytest.mark.parametrize("runner", RUNNERS)
def test_constant_policy_equals_the_static_checkpoint(runner, mode, variant, checkpoints):
    merged, static = (
        generate(checkpoints / folder, runner, mode, policy, *BATCHES, tokens=24)
        for folder, policy in (("merged", rules(f"- use: {variant}")), (variant, None))
    )
    assert merged == static
