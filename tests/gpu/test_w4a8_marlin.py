# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""W4A8 derived for one variant is what stock vLLM computes with Marlin's INT8 activations for all."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import RUNNERS, graph_engine
from tests.integration.conftest import answers

pytestmark = pytest.mark.cuda

PROMPTS = [f"prompt {i} with a few more bytes in it" for i in range(6)]


def generate(folder, runner, policy=None):
    with graph_engine(folder, runner, "FULL_AND_PIECEWISE", policy) as llm:
        return answers(llm, PROMPTS, max_tokens=16, ignore_eos=True)


@pytest.mark.parametrize("runner", RUNNERS)
def test_w4a8_equals_stock_marlin_with_int8_activations(runner, checkpoints, monkeypatch):
    derived = generate(checkpoints / "merged", runner, "w4a8")
    assert derived != generate(checkpoints / "merged", runner, "w4a16")
    # On Hopper stock vLLM takes Machete, which ignores the variable, unless it is kept from it.
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "MacheteLinearKernel")
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "int8")
    assert derived == generate(checkpoints / "w4a16", runner)


@pytest.mark.parametrize("runner", RUNNERS)
def test_single_copy_and_three_variants_serve(runner, checkpoints):
    for policy in ("single-copy", "phase-batch-w4a8"):
        assert all(len(tokens) == 16 for tokens, _ in generate(checkpoints / "merged", runner, policy))
