# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""INT8 and FP8 weights are computed from what Marlin and Humming keep.

Marlin's is packed here by vLLM's own functions in Python, Humming's as its ``process.cuh`` does; a GPU
compares both with what the kernels themselves keep.
"""

from pathlib import Path

import pytest
import torch
from vllm.model_executor.layers.quantization.utils import marlin_utils
from vllm.model_executor.layers.quantization.utils.marlin_utils_test import get_weight_perm, marlin_weights

from tests.checkpoints import make_checkpoint
from tests.gpu.conftest import INTERPRETED, ON_GPU, RUNNERS, generate
from tests.integration.conftest import distance
from tests.policies import rules

pytestmark = pytest.mark.skipif(
    not (ON_GPU or INTERPRETED), reason="Triton needs a GPU, or its interpreter to be chosen"
)

DEVICE = "cuda" if ON_GPU else "cpu"
PROMPTS, MODE = ["a prompt", "another one"], "FULL_AND_PIECEWISE"
LINEARS = {
    "Qwen2.5-0.5B qkv": (896, 1152),
    "SmolLM2-360M o": (960, 960),
    "Qwen2.5-1.5B qkv": (1536, 2048),
    "Llama-3.2-1B kv": (2048, 1024),
    "Gemma-2-2B q": (2304, 2048),
}
"""Inputs and outputs of linears of real models."""
LAYOUTS = MARLIN, HUMMING, HOPPER = "Marlin", "Humming", "Humming for Hopper"
PART = 128
"""Outputs of a part of a linear."""
EVERY_DAY = [
    ("Qwen2.5-0.5B qkv", 128, False, MARLIN),
    ("SmolLM2-360M o", 32, True, MARLIN),
    ("SmolLM2-360M o", 32, True, HOPPER),
    ("Qwen2.5-1.5B qkv", -1, False, MARLIN),
    ("Qwen2.5-1.5B qkv", -1, False, HUMMING),
]
"""Name, size of a group (-1: one for all inputs), whether there are zero points, and the layout."""
ALL = [
    pytest.param(name, group, zeros, layout, PART, marks=pytest.mark.full)
    for name in LINEARS
    for group in (32, 64, 128, -1)
    for zeros in (False, True)
    for layout in LAYOUTS
    if LINEARS[name][0] % group == 0 and (name, group, zeros, layout) not in EVERY_DAY
]
WHOLE = [
    pytest.param(name, 64, False, MARLIN, outputs, marks=pytest.mark.full)
    for name, (_, outputs) in LINEARS.items()
]
"""Triton's interpreter takes as long for these as for all others."""


def zeros_packed_by_humming(zeros: torch.Tensor) -> torch.Tensor:
    """Return zero points [groups, outputs] as Humming packs them, int32 [groups, outputs / 8]."""
    groups, outputs = zeros.shape
    permuted = zeros.view(-1, 64)[:, marlin_utils.get_scale_perms()[0]].view(groups, outputs // 8, 8)
    return (permuted << (4 * torch.arange(8))).sum(-1).to(torch.int32)


@pytest.mark.parametrize("precision", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("name", "group", "has_zeros", "layout", "outputs"),
    [*((*case, PART) for case in EVERY_DAY), *ALL, *WHOLE],
)
def test_8_bit_weights_are_those_of_the_packed_int4_weights(
    name: str, group: int, has_zeros: bool, layout: str, outputs: int, precision: torch.dtype
) -> None:
    from flexquant.serving.worker.one_copy import gpu, gpu_kernel

    kept = dict(zip(LAYOUTS, (gpu.MARLIN, *gpu.HUMMING), strict=True))[layout]
    greatest, inputs = 127 if precision == torch.int8 else 448, LINEARS[name][0]
    generator = torch.Generator().manual_seed(0)
    groups = inputs // group if group > 0 else 1
    values = torch.randint(0, 16, (inputs, outputs), generator=generator)
    scale = (torch.rand(groups, outputs, generator=generator) - 0.3).bfloat16()
    if precision == torch.float8_e4m3fn:  # exact in FP8, whose rounding differs between GPU and interpreter
        scale = scale.sign() * torch.exp2(scale.float().abs().mul(4).round()).bfloat16()
    zeros = torch.randint(0, 16, (groups, outputs), generator=generator)
    if layout == MARLIN:
        packed = marlin_weights(values, inputs, outputs, 4, get_weight_perm(4)).to(DEVICE)
        packed_zeros = marlin_utils.marlin_zero_points(zeros.int(), groups, outputs, 4).to(DEVICE)
    else:
        packed = gpu.packed_alike(values.t(), kept).to(DEVICE)
        packed_zeros = zeros_packed_by_humming(zeros).to(DEVICE)
    permuted = marlin_utils.marlin_permute_scales(scale, inputs, outputs, group).to(DEVICE)
    zero, middle = None, torch.full((groups, outputs), 8)
    if has_zeros:
        middle = zeros
        zero = gpu.zeros_in_order_of_outputs(packed_zeros, groups, outputs, kept.zeros)
        assert torch.equal(zero.cpu().long(), zeros)
    assert torch.equal(gpu.in_order_of_outputs(permuted).cpu(), scale)
    channel = gpu.channel_scales(packed, permuted, zero, precision, kept.outputs_first)
    codes = (values.view(groups, -1, outputs) - middle[:, None]).float()
    weights = (codes * scale.float()[:, None]).view(inputs, outputs)
    torch.testing.assert_close(channel.cpu(), weights.abs().amax(0) / greatest)
    if precision == torch.float8_e4m3fn:
        channel = torch.exp2(channel.log2().ceil() + 4)  # weights that are no integers too
    out = torch.empty(outputs, inputs, dtype=precision, device=DEVICE)
    row = channel.reciprocal()
    found = gpu_kernel.eight_bit_weights(packed, permuted, zero, row, out, kept.outputs_first).cpu()
    exact = (codes * (scale.float() * row.cpu())[:, None]).view(inputs, outputs)
    nearest = exact.round().to(torch.int8) if precision == torch.int8 else exact.to(precision)
    assert torch.equal(found.t().float(), nearest.float())
    if precision == torch.int8:
        column = torch.rand(inputs, generator=generator) / 2 + 0.4
        difference = torch.randint(0, 16, (outputs, inputs), generator=generator)
        added = gpu.packed_alike(difference, kept).to(DEVICE)
        places = torch.rand(outputs, inputs, generator=generator).argsort(1)[:, :5].int()
        values = torch.randint(-128, 128, places.shape, generator=generator, dtype=torch.int8)
        expected = ((exact * column[:, None]).round() + difference.t() - 8).to(torch.int8)
        expected.t().scatter_(1, places[:, 1:].long(), values[:, 1:])
        places[:, 0] = -1
        nested = [column.to(DEVICE), added, places.to(DEVICE), values.to(DEVICE)]
        found = gpu_kernel.eight_bit_weights(packed, permuted, zero, row, out, kept.outputs_first, nested)
        assert torch.equal(found.cpu().t(), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("group", [32, 128, -1])
@pytest.mark.parametrize("family", ["Marlin", "Humming"])
def test_the_layouts_are_those_of_the_kernels(family: str, group: int, zero_points: bool) -> None:
    from flexquant.serving import vllm_api
    from flexquant.serving.worker.one_copy import gpu

    kind = getattr(vllm_api, f"{family}LinearKernel")
    assert gpu.layout_found(kind, group, zero_points, "bfloat16") is not None


@pytest.mark.cuda
@pytest.mark.parametrize("family", ["marlin", "humming"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_gpu_serves_in_int8_from_one_copy(runner: str, family: str, checkpoints: Path) -> None:
    kernels = {"flexquant": {"kernels": {"w4a16": family}}}
    in_int4, in_int8 = (
        generate(checkpoints / "merged", runner, MODE, policy, PROMPTS, **kernels)[0]
        for policy in ("w4a16", "w8a8-from-int4")
    )
    assert 0 < distance(in_int8, in_int4) < 0.5


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_gpu_serves_in_8_bit_from_16_bit(runner: str, precision: str, tmp_path: Path) -> None:
    if precision == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8")
    folder = make_checkpoint(tmp_path / "model", scheme=None)
    stock, in_16_bit, in_8_bit = (
        generate(folder, runner, MODE, policy, PROMPTS)[0]
        for policy in (None, rules("- use: bf16"), f"{precision}-from-16-bit")
    )
    assert distance(in_16_bit, stock) < 0.03
    assert 0 < distance(in_8_bit, in_16_bit) < 0.5


@pytest.mark.cuda
def test_activations_with_zero_points_are_nearer_to_themselves() -> None:
    from flexquant.serving.worker.one_copy.gpu import multiply_in_8_bit

    x = torch.randn(70, 512, device=DEVICE).relu().sub(0.1).bfloat16()
    weights = torch.randint(-128, 128, (256, 512), dtype=torch.int8, device=DEVICE)
    scale, bias = (torch.rand(256, device=DEVICE) / 100 for _ in range(2))
    expected = x.float() @ (weights * scale[:, None]).t() + bias
    sums = weights.sum(1, dtype=torch.int32)
    found, symmetric = (
        multiply_in_8_bit(x, weights, scale, bias.bfloat16(), of_weights).float() - expected
        for of_weights in (sums, None)
    )
    assert found.norm() < 0.8 * symmetric.norm() < 0.02 * expected.norm()
