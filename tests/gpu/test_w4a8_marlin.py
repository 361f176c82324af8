# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""W4A8 derived for one variant: right by every kernel, and by Marlin what stock vLLM computes for all."""

import pytest
import torch

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


@pytest.mark.parametrize("both_signs", [False, True])
@pytest.mark.parametrize(("activations", "error"), [("int8", 0.02), ("float8_e4m3fn", 0.06)])
@pytest.mark.parametrize("family", ["Cutlass", "Humming", "Marlin"])
def test_a_kernel_multiplies_right(family, activations, error, both_signs):
    """The errors are those of 8-bit activations, with FP8 scales for CUTLASS."""
    from flexquant.serving.kernels import gpu_kernels, trial
    from flexquant.serving.kernels.layers import kernel_of_layer
    from flexquant.serving.vllm_api import scalar_types, unpack_quantized_values_into_int32

    (kind,) = (kind for kind in gpu_kernels.W4A8_KERNELS if kind.__name__.startswith(family))
    shape = {"inputs": 1024, "outputs": 512, "dtype": "bfloat16", "group_size": 128}
    linear = trial.new_layer({**shape, "activations": activations}, kind)
    kernel = kernel_of_layer(linear)
    if problem := kind.can_implement(kernel.config)[1]:
        pytest.skip(problem)
    packed, scale, *_ = kernel._get_weight_params(linear)
    if both_signs:
        if family == "Marlin":
            pytest.skip("FlexQuant refuses them")
        scale.data *= torch.randn_like(scale).sign()
    values = unpack_quantized_values_into_int32(packed.data, scalar_types.uint4b8, 1).float() - 8
    weights = values * scale.data.float().repeat_interleave(128, 1)
    trial.ready(linear)
    x = torch.randn(64, 1024, device="cuda").bfloat16()
    expected = x.float() @ weights.t()
    assert (linear(x).float() - expected).norm() < error * expected.norm()
