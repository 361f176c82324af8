# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A checkpoint in 16 bit is served as it is, and its large passes compute in 8 bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexquant.merge import merge_checkpoints
from flexquant.serving.kernels.layers import kernel_name, linear_sizes
from flexquant.serving.vllm_api import LinearBase
from flexquant.serving.vllm_api import _custom_ops as ops
from tests import programs
from tests.checkpoints import make_checkpoint
from tests.integration.conftest import answers, distance, engine, generate
from tests.integration.test_serving_errors import configure, flexquant, refusal
from tests.policies import rules

pytestmark = pytest.mark.engine

SHORT = ["The capital of France is a city of more than two million people,", "def merge(a, b):"]
LONG = ["word " * 30 + SHORT[0], "all " * 40 + SHORT[1]]
SAMPLING = {"max_tokens": 8}
DERIVED = "{from: bf16, activations: int8, weights: int8}"
IN_INT8 = rules("- use: int8") + f"derive: {{int8: {DERIVED}}}\n"
IN_INT8_TWICE = f"derive: {{int8: {DERIVED}, again: {DERIVED}}}\n"
IN_INT8_TWICE += rules("- {when: {phase: decode}, use: again}", "- use: int8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("16-bit") / "model", "qwen2", None)


def write_int8(model: Path, output: Path) -> Path:
    """Write the W8A8 checkpoint whose weights are those of the model, rounded."""
    make_checkpoint(output, "qwen2", "w8a8")
    file, weights = output / "model.safetensors", load_file(model / "model.safetensors")
    state = load_file(file)
    for name in [key.removesuffix("_scale") for key in state if key.endswith(".weight_scale")]:
        state[name], state[f"{name}_scale"], _ = ops.scaled_int8_quant(weights[name])
    save_file(state, file, metadata={"format": "pt"})
    return output


def test_short_prompts_and_answers_are_those_of_the_model(model: Path) -> None:
    ((short, long), passes, _) = generate(model, ["prefill-8-bit"], SHORT, LONG, sampling=SAMPLING)[0]
    ((stock, stock_long), *_) = generate(model, None, SHORT, LONG, sampling=SAMPLING)[0]
    assert short == stock
    assert 0 < distance(long, stock_long) < 0.2
    taken = {(p["phase"], p["plan"]) for p in passes}
    assert taken == {("prefill", "bf16"), ("prefill", "int8-from-16-bit"), ("decode", "bf16")}


def test_in_int8_it_answers_as_the_checkpoint_of_the_rounded_weights(model: Path, tmp_path: Path) -> None:
    (stock,) = generate(write_int8(model, tmp_path / "w8a8"), None, SHORT, LONG, sampling=SAMPLING)
    for policy in (IN_INT8, IN_INT8_TWICE):
        (ours,) = generate(model, [policy], SHORT, LONG, sampling=SAMPLING)
        assert ours.answers == stock.answers


def test_merged_beside_a_variant_in_int8_it_answers_alike(model: Path, tmp_path: Path) -> None:
    sources = {"bf16": model, "w8a8": write_int8(model, tmp_path / "w8a8")}
    merge_checkpoints(sources, tmp_path / "merged", policy="w8a8")
    policies = ["prefill-8-bit", "w8a8", rules('- use: {default: w8a8, layers: {"0": bf16}}')]
    merged = generate(tmp_path / "merged", policies, SHORT, LONG, sampling=SAMPLING)
    from_16_bit, stored, mixed = merged
    (alone,) = generate(model, ["prefill-8-bit"], SHORT, LONG, sampling=SAMPLING)
    (stock,) = generate(tmp_path / "w8a8", None, SHORT, LONG, sampling=SAMPLING)
    assert (from_16_bit.answers, stored.answers) == (alone.answers, stock.answers)
    assert 0 < distance(mixed.answers[1], stored.answers[1]) < 0.2


@pytest.mark.full
def test_compiled_it_answers_alike(model: Path) -> None:
    compiled, eager = (
        generate(model, ["prefill-8-bit"], LONG, sampling=SAMPLING, enforce_eager=is_eager)[0]
        for is_eager in (False, True)
    )
    assert distance(compiled.answers[0], eager.answers[0]) < 0.03
    assert {p["plan"] for p in compiled.passes} == {"bf16", "int8-from-16-bit"}


def test_routers_experts_and_logits_stay_in_16_bit(tmp_path):
    # A router of 16 experts could be multiplied in 8 bit.
    folder = make_checkpoint(tmp_path / "model", "qwen3_moe", None, num_experts=16)

    def kernels(model: Any) -> dict[str, bool]:
        layers = model.variants["int8"].model.layers[0].named_modules()
        return {path: "16 bit)" in kernel_name(m) for path, m in layers if isinstance(m, LinearBase)}

    def copied(model: Any) -> int:
        """Return the bytes of a weight and a scale an output, as vLLM's operator gives them."""
        linears = [m for m in model.variants["int8"].modules() if isinstance(m, LinearBase)]
        sizes = [linear_sizes(m) for m in linears if "16 bit)" not in kernel_name(m)]
        made = (ops.scaled_int8_quant(torch.ones(outputs, inputs)) for inputs, outputs in sizes)
        return sum(part.nbytes for weight, scales, _ in made for part in (weight, scales))

    with engine(folder, IN_INT8) as llm:
        (in_16_bit,) = llm.apply_model(kernels)
        (nbytes,) = llm.apply_model(lambda model: model.weight_bytes)
        (expected,) = llm.apply_model(copied)
        layers = llm.apply_model(lambda model: model.variants["bf16"].model.layers)
        assert llm.generate(SHORT, use_tqdm=False)
    assert in_16_bit == {"self_attn.qkv_proj": False, "self_attn.o_proj": False, "mlp.gate": True}
    freed = layers[0][0].self_attn.o_proj.weight.numel() == 0
    assert freed == torch.cpu._is_avx512_supported(), "where it can, vLLM packs a weight, and frees it"
    assert 0 < nbytes["int8"] == expected < nbytes["bf16"] / 2


def test_a_draft_model_in_the_same_format_is_left_to_vllm(model: Path, tmp_path: Path) -> None:
    int4 = make_checkpoint(tmp_path / "int4", "qwen2", "w4a16")
    for draft in (model, int4):
        speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
        config = configure(model, config_format="flexquant", speculative_config=speculative)
        of_draft = config.speculative_config.draft_model_config
        assert of_draft.architecture == "Qwen2ForCausalLM" != config.model_config.architecture
        assert of_draft.quantization == (None if draft == model else "compressed-tensors")
    with engine(model, "prefill-8-bit", speculative_config=speculative) as llm:
        drafted = answers(llm, SHORT, **SAMPLING)
    (stock,) = generate(model, None, SHORT, LONG, sampling=SAMPLING)
    assert distance(drafted, stock.answers[0]) < 0.03


def test_fp8_is_refused_on_a_cpu(model: Path) -> None:
    said = refusal(model, config_format="flexquant", **flexquant(policy="prefill-fp8"))
    assert "which is for GPUs; choose a policy without it" in said


def test_commands_read_it(model: Path) -> None:
    command = [sys.executable, "-m", "flexquant"]
    shown = programs.run([*command, "inspect", model], timeout=120)
    assert "16 bit" in shown.stdout
    examined = programs.run([*command, "doctor", model], timeout=120, status=None)
    assert "int8-from-16-bit" in examined.stdout, examined.stdout + examined.stderr
