# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""W4A8 computed from the W4A16 weights: its arithmetic, a checkpoint of one copy, and what is refused."""

from __future__ import annotations

import json
import statistics

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file
from vllm import SamplingParams
from vllm.platforms import current_platform

from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints
from flexquant.w4a8 import find_kernel, is_int4_layer
from tests.checkpoints import make_checkpoint
from tests.integration.conftest import Answers, answers, engine
from tests.integration.test_serving_errors import flexquant, refusal

pytestmark = pytest.mark.engine

TEXT = (
    "Free software is a matter of liberty, not price. Anyone who has a copy of such a program may run it, "
    "study how it works, change it, and pass it on to others, with or without changes. For that, its source "
    "code has to be available. Most distributions of Linux consist of thousands of such programs, which "
    "people all over the world maintain, many of them in their spare time."
)
PROMPTS = ["What is the capital of France?", "Once upon a time, in a village by the sea,"]
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
    """A merged checkpoint that holds W4A16 alone, beside its source."""
    folder = tmp_path_factory.mktemp("single")
    source = make_checkpoint(folder / "w4a16", scheme="w4a16", hidden_size=512, intermediate_size=1024)
    merge_checkpoints({"w4a16": source}, folder / "merged")
    return folder


def served(folder, policy, **options):
    with engine(folder, policy, **options) as llm:
        return answers(llm, PROMPTS)


def layer_output(llm, name: str, x: torch.Tensor) -> torch.Tensor:
    def run(model):
        return model.variants["w4a8"].get_submodule(name)(x)[0]

    return llm.apply_model(run)[0]


def test_a_layer_multiplies_dequantised_int4_weights_with_int8_activations(single):
    tensors = load_file(single / "w4a16" / "model.safetensors")
    packed, scale = tensors[f"{DOWN}.weight_packed"], tensors[f"{DOWN}.weight_scale"]
    shape = torch.Size(tensors[f"{DOWN}.weight_shape"].tolist())
    weight = unpack_from_int32(packed, 4, shape).double() * scale.double().repeat_interleave(64, dim=1)
    x = torch.randn(5, shape[1], dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    x_scale = x.double().abs().amax(dim=1, keepdim=True) / 127
    expected = (torch.round(x.double() / x_scale) @ weight.t()) * x_scale
    with engine(single / "merged", "w4a8", dtype="bfloat16") as llm:
        output = layer_output(llm, DOWN, x)
    assert torch.allclose(output.double(), expected, rtol=2**-7, atol=1e-3 * expected.abs().max())
    assert not torch.allclose(output.double(), x.double() @ weight.t(), rtol=2**-7, atol=1e-3)


def count_int4_weights(model) -> int:
    layers = model.variants["w4a16"].modules()
    return sum(layer.input_size * layer.output_size for layer in layers if is_int4_layer(layer))


def test_one_copy_serves_small_passes_as_w4a16_and_large_ones_as_w4a8(single, tmp_path):
    """Its weights, but for embedding and lm_head, take 4.25 + 4.25 bits, as the groups are of 64."""
    trace = tmp_path / "trace.jsonl"
    with engine(single / "merged", "single-copy", flexquant={"trace": str(trace)}) as llm:
        short = answers(llm, ["short"])
        answers(llm, ["a prompt of more than thirty-two tokens, which are bytes here"])
        (weights,) = llm.apply_model(count_int4_weights)
    header, *passes = [json.loads(line) for line in trace.read_text().splitlines()]
    assert {(p["tokens"] <= 32, p["plan"]) for p in passes} == {(True, "w4a16"), (False, "w4a8")}
    sizes = header["weight_bytes"]
    assert 8 * sizes["w4a16"] / weights == 8 * sizes["w4a8"] / weights == pytest.approx(4.25, abs=0.01)
    with engine(single / "w4a16") as llm:
        assert short == answers(llm, ["short"])


def test_all_else_is_shared_with_the_source(single):
    with engine(single / "merged", "single-copy") as llm:
        (kinds,) = llm.apply_model(
            lambda model: {
                type(module).__name__
                for name, module in model.variants["w4a8"].named_modules()
                if module._parameters and module is not model.variants["w4a16"].get_submodule(name)
            }
        )
    assert kinds == {"QKVParallelLinear", "RowParallelLinear", "MergedColumnParallelLinear"}


def answers_and_loss(folder, policy) -> tuple[Answers, float]:
    """Greedy answers to PROMPTS, and the mean negative log-likelihood of TEXT in nats per token."""
    with engine(folder, policy) as llm:
        (output,) = llm.generate([TEXT], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        steps = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        loss = -statistics.fmean(step[token].logprob for token, step in steps)
        return answers(llm, PROMPTS), loss


def test_three_variants_from_two(real_merged):
    """On the real model: W4A8 computes something else than W4A16, but a model that is hardly worse."""
    w4a8, w4a8_loss = answers_and_loss(real_merged, "w4a8")
    w4a16, w4a16_loss = answers_and_loss(real_merged, "w4a16")
    assert w4a8 != w4a16
    assert w4a8_loss == pytest.approx(w4a16_loss, abs=0.5)
    assert served(real_merged, "phase-batch-w4a8") == served(real_merged, "phase")


def test_w4a8_cannot_come_from_other_weights(tiny_merged, tmp_path):
    policy = tmp_path / "p.yaml"
    policy.write_text(DERIVE.format(source="w8a8", activations="int8"))
    message = refusal(tiny_merged() / "merged", **flexquant(policy=str(policy)))
    assert "derive.fast derives 'fast' from 'w8a8', which has no symmetric INT4 weights" in message


@pytest.mark.skipif(not current_platform.is_cpu(), reason="some GPUs have the kernel")
def test_device_without_a_kernel_is_refused_before_loading(tiny_merged, tmp_path):
    policy = tmp_path / "p.yaml"
    policy.write_text(DERIVE.format(source="w4a16", activations="fp8"))
    message = refusal(tiny_merged() / "merged", **flexquant(policy=str(policy)))
    assert message.startswith("there is no kernel for INT4 weights with fp8 activations on this CPU")
    with pytest.raises(FlexQuantError):
        find_kernel("fp8")
