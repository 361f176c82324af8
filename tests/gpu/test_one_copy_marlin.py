# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""INT8 and FP8 weights are computed from what Marlin keeps, as vLLM's own functions in Python pack it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vllm.model_executor.layers.quantization.utils.marlin_utils import (
    marlin_permute_scales,
    marlin_zero_points,
)
from vllm.model_executor.layers.quantization.utils.marlin_utils_test import get_weight_perm, marlin_weights

from tests.gpu.conftest import INTERPRETED, ON_GPU, RUNNERS, generate
from tests.integration.logprobs import distance

pytestmark = pytest.mark.skipif(
    not (ON_GPU or INTERPRETED), reason="Triton needs a GPU, or its interpreter to be chosen"
)

DEVICE = "cuda" if ON_GPU else "cpu"
LINEARS = {
    "Qwen2.5-0.5B qkv": (896, 1152),
    "SmolLM2-360M o": (960, 960),
    "Qwen2.5-1.5B qkv": (1536, 2048),
    "Llama-3.2-1B kv": (2048, 1024),
    "Gemma-2-2B q": (2304, 2048),
}
"""Inputs and outputs of linears of real models."""
PART = 128
"""Outputs of a part of a linear."""
EVERY_DAY = [
    ("Qwen2.5-0.5B qkv", 128, False),
    ("SmolLM2-360M o", 32, True),
    ("Qwen2.5-1.5B qkv", -1, False),
    ("Llama-3.2-1B kv", 128, True),
    ("Gemma-2-2B q", 64, False),
]
"""Name, size of a group (-1: one for all inputs), and whether there are zero points."""
ALL = [
    pytest.param(name, group, zeros, LINEARS[name][1], marks=pytest.mark.full)
    for name in LINEARS
    for group in (32, 64, 128, -1)
    for zeros in (False, True)
    if LINEARS[name][0] % group == 0
]


@pytest.mark.parametrize("precision", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("name", "group", "has_zeros", "outputs"), [*((*case, PART) for case in EVERY_DAY), *ALL]
)
def test_8_bit_weights_are_those_of_the_packed_int4_weights(
    name: str, group: int, has_zeros: bool, outputs: int, precision: torch.dtype
) -> None:
    from flexquant.serving.worker.one_copy import marlin

    greatest = 127 if precision == torch.int8 else 448
    inputs, _ = LINEARS[name]
    generator = torch.Generator().manual_seed(0)
    groups = inputs // group if group > 0 else 1
    values = torch.randint(0, 16, (inputs, outputs), generator=generator)
    scale = (torch.rand(groups, outputs, generator=generator) - 0.3).bfloat16()
    if precision == torch.float8_e4m3fn:  # exact in FP8, whose rounding differs between GPU and interpreter
        scale = scale.sign() * torch.exp2(scale.float().abs().mul(4).round()).bfloat16()
    zeros = torch.randint(0, 16, (groups, outputs), generator=generator)
    packed = marlin_weights(values, inputs, outputs, 4, get_weight_perm(4)).to(DEVICE)
    permuted = marlin_permute_scales(scale, inputs, outputs, group).to(DEVICE)
    zero, middle = None, torch.full((groups, outputs), 8)
    if has_zeros:
        middle = zeros
        packed_zeros = marlin_zero_points(zeros.int(), groups, outputs, 4).to(DEVICE)
        zero = marlin.zeros_in_order_of_outputs(packed_zeros, groups, outputs)
        assert torch.equal(zero.cpu().long(), zeros)
    assert torch.equal(marlin.in_order_of_outputs(permuted).cpu(), scale)

    channel = marlin.marlin_channel_scales(packed, permuted, zero, precision)
    codes = (values.view(groups, -1, outputs) - middle[:, None]).float()
    weights = (codes * scale.float()[:, None]).view(inputs, outputs)
    torch.testing.assert_close(channel.cpu(), weights.abs().amax(0) / greatest)
    if precision == torch.float8_e4m3fn:
        channel = torch.exp2(channel.log2().ceil() + 4)  # weights that are no integers too
    out = torch.empty(outputs, inputs, dtype=precision, device=DEVICE)
    found = marlin.eight_bit_weights(packed, permuted, zero, channel, out).cpu()
    exact = (codes * (scale.float() / channel.cpu())[:, None]).view(inputs, outputs)
    nearest = exact.round().to(torch.int8) if precision == torch.int8 else exact.to(precision)
    assert torch.equal(found.t().float(), nearest.float())


@pytest.mark.cuda
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_gpu_serves_in_int8_from_marlins_weights(runner: str, checkpoints: Path) -> None:
    prompts, mode = ["a prompt", "another one"], "FULL_AND_PIECEWISE"
    in_int4, in_int8 = (
        generate(checkpoints / "merged", runner, mode, policy, prompts)[0]
        for policy in ("w4a16", "w8a8-from-int4")
    )
    assert 0 < distance(in_int8, in_int4) < 0.5
