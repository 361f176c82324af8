# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""INT8 weights with activations in 16 bit on a CPU, against their product in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flexquant.serving.kernels import cpu_w8a16
from flexquant.serving.kernels.cpu_w8a16 import CPUW8A16LinearKernel
from flexquant.serving.vllm_api import MPLinearLayerConfig, scalar_types

INPUTS, OUTPUTS = 576, 192


def packed(values: torch.Tensor) -> torch.Tensor:
    """Return int8 [outputs, inputs] as compressed-tensors packs them, int32 [outputs, inputs / 4]."""
    return (values.short() + 128).to(torch.uint8).view(torch.int32)


@pytest.fixture(params=["loops", "without a compiler", "without bfloat16 loops"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CPUW8A16LinearKernel:
    if request.param == "without a compiler":
        monkeypatch.setattr(cpu_w8a16, "has_loops", lambda: False)
    elif request.param == "without bfloat16 loops":
        monkeypatch.setattr(cpu_w8a16, "TOKENS_BEFORE_AMX", -1)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    config = MPLinearLayerConfig(
        full_weight_shape=(INPUTS, OUTPUTS),
        partition_weight_shape=(INPUTS, OUTPUTS),
        weight_type=scalar_types.uint8b128,
        act_type=torch.bfloat16,
        group_size=-1,
        zero_points=False,
    )
    assert CPUW8A16LinearKernel.can_implement(config)[0]
    return CPUW8A16LinearKernel(config, "weight_packed", "weight_scale")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_are_those_of_the_stored_weights(kernel, dtype, monkeypatch):
    monkeypatch.setattr(cpu_w8a16, "SLICE", 64 * INPUTS)
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-128, 128, (OUTPUTS, INPUTS), generator=generator, dtype=torch.int8)
    scale = torch.rand(OUTPUTS, 1, generator=generator).to(dtype)
    layer = nn.Module()
    layer.weight_packed = nn.Parameter(packed(values), requires_grad=False)
    layer.weight_scale = nn.Parameter(scale, requires_grad=False)
    kernel.process_weights_after_loading(layer)
    exact = values.double() * scale.double()
    numbers = torch.tensor([[0, 31, 32], [190, 191, 5]])
    assert torch.equal(kernel.rows(layer, numbers), exact.float()[numbers])
    for tokens in (0, 1, 2, 3, 8, 9, 21):
        x, bias = torch.randn(tokens, INPUTS, generator=generator).to(dtype), torch.randn(OUTPUTS).to(dtype)
        for added in (None, bias):
            out = kernel.apply_weights(layer, x[None], added)
            expected = x.double() @ exact.t() + (0 if added is None else added.double())
            assert out.dtype == dtype and out.shape == (1, tokens, OUTPUTS)
            rounding = 2 * torch.finfo(dtype).eps * expected.abs() + 1e-3 * exact.abs().sum(1).max() * 0.01
            assert ((out[0].double() - expected).abs() <= rounding).all(), tokens
