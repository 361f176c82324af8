# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""W4A8 computed from the W4A16 weights: its arithmetic, a checkpoint of one copy, and what is refused."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file
from torch import nn
from vllm.platforms import current_platform

from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints
from flexquant.serving.vllm_api import CompressedTensorsWNA16
from flexquant.serving.worker.w4a8 import find_kernels, int4_scheme, use_8bit_activations
from tests.checkpoints import make_checkpoint
from tests.integration.conftest import (
    Answers,
    answers,
    bytes_of_int4_group,
    distance,
    engine,
    generate,
    records_of,
)
from tests.integration.test_serving_errors import flexquant, refusal

pytestmark = pytest.mark.engine

SHORT = ["short"]
INTERMEDIATE = 1024
DOWN = "model.layers.0.mlp.down_proj"
DERIVE = """
schema: flexquant.policy/v1
derive:
  fast: {{from: {source}, activations: {activations}}}
rules:
  - use: fast
"""


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Return a merged checkpoint that holds W4A16 alone, beside its source."""
    folder = tmp_path_factory.mktemp("single")
    sizes = {"hidden_size": 512, "intermediate_size": INTERMEDIATE}
    source = make_checkpoint(folder / "w4a16", scheme="w4a16", **sizes)
    merge_checkpoints({"w4a16": source}, folder / "merged")
    return folder


class SingleCopy(NamedTuple):
    """What is left of an engine that serves ``single`` by ``single-copy``, which uses W4A16 and W4A8."""

    x: torch.Tensor
    """Inputs [tokens, in] of W4A8's DOWN."""
    outputs: torch.Tensor
    """Outputs [tokens, out] of W4A8's DOWN."""
    short: Answers
    """The answers to SHORT; a long prompt was answered after it."""
    int4_weights: int
    own_modules: set[str]
    """The kinds of W4A8's modules with parameters that are not W4A16's."""
    header: dict[str, Any]
    passes: list[dict[str, Any]]


def own_modules(model) -> set[str]:
    return {
        type(module).__name__
        for name, module in model.variants["w4a8"].named_modules()
        if module._parameters and module is not model.variants["w4a16"].get_submodule(name)
    }


def count_int4_weights(model) -> int:
    layers = model.variants["w4a16"].modules()
    return sum(layer.input_size * layer.output_size for layer in layers if int4_scheme(layer))


@pytest.fixture(scope="module")
def single_copy(single, tmp_path_factory) -> SingleCopy:
    trace = tmp_path_factory.mktemp("single_copy") / "trace.jsonl"
    x = torch.randn(5, INTERMEDIATE, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    with engine(single / "merged", "single-copy", flexquant={"trace": str(trace)}) as llm:
        (outputs,) = llm.apply_model(lambda model: model.variants["w4a8"].get_submodule(DOWN)(x)[0])
        (weights,) = llm.apply_model(count_int4_weights)
        (kinds,) = llm.apply_model(own_modules)
        short = answers(llm, SHORT)
        answers(llm, ["a prompt of more than thirty-two tokens, which are bytes here"])
    header, *passes = records_of(trace)
    return SingleCopy(x, outputs, short, weights, kinds, header, passes)


def test_a_layer_multiplies_dequantised_int4_weights_with_int8_activations(single, single_copy):
    tensors = load_file(single / "w4a16" / "model.safetensors")
    packed, scale = tensors[f"{DOWN}.weight_packed"], tensors[f"{DOWN}.weight_scale"]
    shape = torch.Size(tensors[f"{DOWN}.weight_shape"].tolist())
    weight = unpack_from_int32(packed, 4, shape).double() * scale.double().repeat_interleave(64, dim=1)
    x, outputs = single_copy.x.double(), single_copy.outputs.double()
    x_scale = x.abs().amax(dim=1, keepdim=True) / 127
    expected = (torch.round(x / x_scale) @ weight.t()) * x_scale
    assert torch.allclose(outputs, expected, rtol=2**-7, atol=1e-3 * expected.abs().max())
    assert not torch.allclose(outputs, x @ weight.t(), rtol=2**-7, atol=1e-3)


def test_one_copy_serves_small_passes_as_w4a16_and_large_ones_as_w4a8(single, single_copy):
    """All weights but embedding and lm_head take 4.5 bits and what W4A16's groups of 64 take."""
    plans = {(p["tokens"] <= 32, p["plan"]) for p in single_copy.passes}
    assert plans == {(True, "w4a16"), (False, "w4a8")}
    sizes, weights = single_copy.header["weight_bytes"], single_copy.int4_weights
    assert 8 * sizes["w4a8"] / weights == pytest.approx(4.5, abs=0.01)
    assert 8 * sizes["w4a16"] / weights == pytest.approx(4 + bytes_of_int4_group() / 8, abs=0.01)
    (stock,) = generate(single / "w4a16", None, SHORT)
    assert [single_copy.short] == stock.answers


def test_all_else_is_shared_with_the_source(single_copy):
    linears = {"QKVParallelLinear", "RowParallelLinear", "MergedColumnParallelLinear"}
    assert single_copy.own_modules == linears


@pytest.mark.full
def test_three_variants_from_two(tiny_merged):
    """Other activations change W4A16, but not much more than other weights do."""
    policies, prompts = ["w8a8", "w4a16", "w4a8", "phase", "phase-batch-w4a8"], ["a prompt", "another prompt"]
    served = generate(tiny_merged() / "merged", policies, prompts, sampling={"ignore_eos": True})
    w8a8, w4a16, w4a8, phase, in_batches = (found.answers[0] for found in served)
    assert 0 < distance(w4a8, w4a16) < distance(w8a8, w4a16)
    assert in_batches == phase


def refused(folder, work, source: str, activations: str) -> str:
    policy = work / "p.yaml"
    policy.write_text(DERIVE.format(source=source, activations=activations))
    return refusal(folder / "merged", **flexquant(policy=str(policy)))


def test_w4a8_cannot_come_from_other_weights(tiny_merged, tmp_path):
    message = refused(tiny_merged(), tmp_path, "w8a8", "int8")
    assert "derive.fast derives 'fast' from 'w8a8', which has no symmetric INT4 weights" in message


@pytest.mark.skipif(not current_platform.is_cpu(), reason="some GPUs have the kernel")
def test_device_without_a_kernel_is_refused_before_loading(tiny_merged, tmp_path):
    message = refused(tiny_merged(), tmp_path, "w4a16", "fp8")
    assert message.startswith("there is no kernel for INT4 weights with fp8 activations on this CPU")
    with pytest.raises(FlexQuantError):
        find_kernels("fp8")


def test_a_layer_that_vllm_runs_without_a_kernel_is_refused():
    """vLLM 0.33 builds INT4 layers so in its batch-invariant mode."""
    layer = nn.Module()
    layer.scheme = CompressedTensorsWNA16(strategy="group", num_bits=4, group_size=64)
    layer.scheme.kernel = None
    with pytest.raises(FlexQuantError, match="layer 'down_proj' cannot have int8 .*VLLM_BATCH_INVARIANT"):
        use_8bit_activations(nn.ModuleDict({"down_proj": layer}), "int8")
