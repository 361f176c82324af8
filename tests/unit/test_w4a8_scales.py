# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""W4A8 of scales below zero, or of asymmetric weights: computed right, or refused early; W8A16's products."""

from typing import Any

import pytest
import torch
from torch import nn
from vllm.platforms import current_platform

from flexquant.checkpoint.merged_config import MergedConfig, StoredVariant, as_merged, read_merged_config
from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints
from flexquant.policy.schema import Derivation
from flexquant.serving.derivable import check_derivable, layer_problem
from flexquant.serving.kernels import cpu_kernels, cpu_weight_only, trial
from flexquant.serving.kernels.cpu_kernels import provide_cpu_kernels
from flexquant.serving.kernels.cpu_weight_only import CPUW8A16LinearKernel, TorchCPUInt4LinearKernel
from flexquant.serving.kernels.gpu_kernels import W4A8_KERNELS, MarlinW4A8LinearKernel
from flexquant.serving.vllm_api import MPLinearLayerConfig, scalar_types
from flexquant.serving.worker.w4a8 import find_kernels
from tests.checkpoints import make_pair
from tests.publishers import edits
from tests.unit.test_one_copy import INPUTS, made

OUTPUTS, GROUP = 128, 64
SIGNS = {"positive": 1.0, "negative": -1.0, "both": None}


def kernels() -> list[Any]:
    provide_cpu_kernels()
    kinds: list[Any] = [TorchCPUInt4LinearKernel, cpu_kernels.TorchCPUW4A8LinearKernel]
    if hasattr(torch.ops._C, "cpu_gemm_wna16"):
        kinds.append(cpu_kernels.CPUW4A16LinearKernel)
    return kinds + [cpu_kernels.AMXW4A8LinearKernel] * torch.cpu._is_amx_tile_supported()


@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("kind", kernels())
def test_group_scales_below_zero_are_multiplied_with(kind, sign, tokens):
    kernel, linear, weight = made(kind, OUTPUTS, GROUP, SIGNS[sign])
    x = torch.randn(tokens, INPUTS, dtype=torch.bfloat16)
    expected = x.double() @ weight.t()
    assert (kernel.apply_weights(linear, x, None).double() - expected).norm() < 0.02 * expected.norm()


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}


W4A8 = Derivation.model_validate({"from": "w4a16", "activations": "int8"})
ONE_COPY = Derivation.model_validate({"from": "w4a16", "activations": "int8", "weights": "int8"})
DERIVES = "p.yaml:3: derive.fast derives 'fast'"
REORDERED = ("group", "GROUP", "dynamic", "Dynamic", True)
"""What compressed-tensors reads as groups in the order of the inputs' activations."""


def derive(*weights: dict[str, Any], negative_scales: bool = False) -> None:
    groups = {f"group_{i}": {"targets": ["Linear"], "weights": w} for i, w in enumerate(weights)}
    check_derivable(DERIVES, W4A8, StoredVariant("w4a16.", {"config_groups": groups}, True, negative_scales))


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ([{**INT4, "symmetric": False}], "not symmetric INT4"),
        ([INT4, {**INT4, "symmetric": False}], "not symmetric INT4"),
        ([INT4, INT8], "not symmetric INT4"),
        ([{**INT4, "strategy": "channel", "group_size": None}], "one scale a channel"),
        *(([{**INT4, "actorder": order}], "ordered by activation") for order in REORDERED),
        ([{**INT4, "actorder": "columns"}], "have an order that is not known .actorder 'columns'"),
        ([FP8], "no symmetric INT4 weights"),
    ],
)
def test_weights_without_w4a8_are_refused_with_the_policy(weights, problem):
    with pytest.raises(FlexQuantError, match=f"p.yaml:3.* derives 'fast' from 'w4a16', .*{problem}"):
        derive(*weights)


def test_published_weights_in_a_format_of_their_own_have_no_w4a8():
    """vLLM keeps the kernels of such layers elsewhere, so that they would go on as W4A16."""
    section = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    config = as_merged({"architectures": ["LlamaForCausalLM"], "quantization_config": section}, "model")
    source = MergedConfig.from_json(config["quantization_config"]).variants["w4a16"]
    check_derivable(DERIVES, ONE_COPY, source)
    with pytest.raises(FlexQuantError, match="from 'w4a16', which is in the format of gptq"):
        check_derivable(DERIVES, W4A8, source)


@pytest.mark.parametrize("order", REORDERED)
def test_groups_in_the_order_of_activations_have_no_one_copy(order):
    groups = {"group_0": {"weights": {**INT4, "actorder": order}}}
    source = StoredVariant("w4a16.", {"config_groups": groups}, True, False)
    with pytest.raises(FlexQuantError, match="derives 'fast' from 'w4a16', whose groups are ordered by act"):
        check_derivable(DERIVES, ONE_COPY, source)


@pytest.mark.parametrize("order", ["static", "STATIC", "weight", "Weight", False, None])
def test_an_order_of_quantising_alone_is_none(order):
    derive({**INT4, "actorder": order})
    assert layer_problem({"actorder": order}) is None


def test_symmetric_int4_in_groups_is_taken_beside_other_schemes():
    derive(INT4, FP8)
    derive({key: INT4[key] for key in ("num_bits", "group_size")}, negative_scales=True)


def test_merging_tells_of_scales_below_zero(tmp_path):
    sources, scale = make_pair(tmp_path), "model.layers.1.mlp.up_proj.weight_scale"
    for name, expected in (("before", False), ("after", True)):
        merge_checkpoints(sources, tmp_path / name)
        variants = read_merged_config(tmp_path / name)[0].variants
        assert [v.negative_scales for v in variants.values()] == [False, expected]
        edits.tensors(lambda state: state[scale][5, 1].neg_())(sources["w4a16"])


def test_scales_below_zero_are_refused_where_marlin_would_multiply_with_them(monkeypatch):
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    derive(INT4)
    with pytest.raises(FlexQuantError, match="variant 'w4a16' has scales below zero.*Marlin"):
        derive(INT4, negative_scales=True)
    layer = {"inputs": INPUTS, "outputs": OUTPUTS, "dtype": "bfloat16", "group_size": 128}
    assert find_kernels("int8") == W4A8_KERNELS
    linear = trial.new_layer({**layer, "activations": "int8"}, MarlinW4A8LinearKernel)
    linear.weight_scale.data[3, 1] *= -1
    with pytest.raises(FlexQuantError, match="INT4 layer has scales below zero"):
        trial.ready(linear)


COLUMNS, ROWS = 576, 192


def packed(values: torch.Tensor) -> torch.Tensor:
    """Return int8 [outputs, inputs] as compressed-tensors packs them, int32 [outputs, inputs / 4]."""
    return (values.short() + 128).to(torch.uint8).view(torch.int32)


@pytest.fixture(params=["loops", "without a compiler", "without bfloat16 loops"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CPUW8A16LinearKernel:
    if request.param == "without a compiler":
        monkeypatch.setattr(cpu_weight_only, "has_loops", lambda: False)
    elif request.param == "without bfloat16 loops":
        monkeypatch.setattr(cpu_weight_only, "TOKENS_BEFORE_AMX", -1)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    config = MPLinearLayerConfig(
        full_weight_shape=(COLUMNS, ROWS),
        partition_weight_shape=(COLUMNS, ROWS),
        weight_type=scalar_types.uint8b128,
        act_type=torch.bfloat16,
        group_size=-1,
        zero_points=False,
    )
    assert CPUW8A16LinearKernel.can_implement(config)[0]
    return CPUW8A16LinearKernel(config, "weight_packed", "weight_scale")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_are_those_of_the_stored_weights(kernel, dtype, monkeypatch):
    monkeypatch.setattr(cpu_weight_only, "SLICE", 64 * COLUMNS)
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-128, 128, (ROWS, COLUMNS), generator=generator, dtype=torch.int8)
    scale = torch.rand(ROWS, 1, generator=generator).to(dtype)
    layer = nn.Module()
    layer.weight_packed = nn.Parameter(packed(values), requires_grad=False)
    layer.weight_scale = nn.Parameter(scale, requires_grad=False)
    kernel.process_weights_after_loading(layer)
    exact = values.double() * scale.double()
    numbers = torch.tensor([[0, 31, 32], [190, 191, 5]])
    assert torch.equal(kernel.rows(layer, numbers), exact.float()[numbers])
    for tokens in (0, 1, 2, 3, 8, 9, 21):
        x, bias = torch.randn(tokens, COLUMNS, generator=generator).to(dtype), torch.randn(ROWS).to(dtype)
        for added in (None, bias):
            out = kernel.apply_weights(layer, x[None], added)
            expected = x.double() @ exact.t() + (0 if added is None else added.double())
            assert out.dtype == dtype and out.shape == (1, tokens, ROWS)
            rounding = 2 * torch.finfo(dtype).eps * expected.abs() + 1e-3 * exact.abs().sum(1).max() * 0.01
            assert ((out[0].double() - expected).abs() <= rounding).all(), tokens
