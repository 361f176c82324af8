# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""W4A8 derived for one variant is what stock vLLM computes with Marlin's INT8 activations for all."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import RUNNERS, generate

pytestmark = pytest.mark.cuda

PROMPTS = [f"prompt {i} with a few more bytes in it" for i in range(6)]


def serve(folder, runner, policy=None, **kernels):
    options = {"flexquant": {"kernels": kernels}} if policy else {}
    return generate(folder, runner, "FULL_AND_PIECEWISE", policy, PROMPTS, **options)


@pytest.mark.parametrize("runner", RUNNERS)
def test_w4a8_equals_stock_marlin_with_int8_activations(runner, checkpoints, monkeypatch):
    derived = serve(checkpoints / "merged", runner, "w4a8", w4a8="marlin")
    assert derived != serve(checkpoints / "merged", runner, "w4a16")
    # On Hopper stock vLLM takes Machete, which ignores the variable, unless it is kept from it.
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "MacheteLinearKernel")
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "int8")
    assert derived == serve(checkpoints / "w4a16", runner)


@pytest.mark.parametrize("runner", RUNNERS)
def test_single_copy_and_three_variants_serve(runner, checkpoints):
    for policy in ("single-copy", "phase-batch-w4a8"):
        assert all(len(tokens) == 16 for tokens, _ in serve(checkpoints / "merged", runner, policy)[0])
