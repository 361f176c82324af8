# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Compiled and captured, a constant policy is the static checkpoint, in every graph mode of both runners."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import ON_GPU, RUNNERS, graph_engine
from tests.integration.conftest import answers
from tests.policies import rules

MODES = [None, "NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL", "FULL_AND_PIECEWISE"]
LONG = "a prompt of several chunks and more tokens than the largest graph holds; " * 6
BATCHES = [["alone"], [f"prompt {i}" for i in range(3)], [LONG, *(f"{i} side by side" for i in range(19))]]


def generate(folder, runner, mode, policy=None):
    with graph_engine(folder, runner, mode, policy) as llm:
        return [answers(llm, batch, max_tokens=24, ignore_eos=True) for batch in BATCHES]


def the_last_every_day(*values):
    """Mark all but the last for test-full, unless there is a GPU.

    What a graph holds does not change with the kernels, and test_replays reads it in other modes.
    """
    *others, last = values
    return [*(pytest.param(value, marks=[] if ON_GPU else pytest.mark.full) for value in others), last]


@pytest.mark.parametrize("variant", the_last_every_day("w4a16", "fp8", "w8a8"))
@pytest.mark.parametrize("mode", the_last_every_day(*MODES))
@pytest.mark.parametrize("runner", RUNNERS)
def test_constant_policy_equals_the_static_checkpoint(runner, mode, variant, checkpoints):
    merged = generate(checkpoints / "merged", runner, mode, policy=rules(f"- use: {variant}"))
    assert merged == generate(checkpoints / variant, runner, mode)
