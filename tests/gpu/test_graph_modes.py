# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Compiled and captured, a constant policy is the static checkpoint, in every graph mode of both runners."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import ON_GPU, RUNNERS, graph_engine
from tests.integration.conftest import answers
from tests.policies import rules

MODES = [None, "NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL"]
LONG = "a prompt of several chunks and more tokens than the largest graph holds; " * 6
BATCHES = [["alone"], [f"prompt {i}" for i in range(3)], [LONG, *(f"{i} side by side" for i in range(19))]]


def generate(folder, runner, mode, policy=None):
    with graph_engine(folder, runner, mode, policy) as llm:
        return [answers(llm, batch, max_tokens=24, ignore_eos=True) for batch in BATCHES]


# Without a GPU one variant is enough for ``make test``: the kernels do not change what a graph holds.
OTHERS = [pytest.param(name, marks=[] if ON_GPU else pytest.mark.full) for name in ("w4a16", "fp8")]


@pytest.mark.parametrize("variant", ["w8a8", *OTHERS])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("runner", RUNNERS)
def test_constant_policy_equals_the_static_checkpoint(runner, mode, variant, checkpoints):
    merged = generate(checkpoints / "merged", runner, mode, policy=rules(f"- use: {variant}"))
    assert merged == generate(checkpoints / variant, runner, mode)
