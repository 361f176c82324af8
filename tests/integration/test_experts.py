# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Mixtures of experts: every variant has expert layers of its own, and equal experts exist once."""

from __future__ import annotations

import pytest
from vllm.platforms import current_platform

from flexquant.checkpoint.merged_config import read_merged_config
from tests.checkpoints import EXPERTS, MIXTURES
from tests.integration.conftest import answers, engine
from tests.integration.test_architectures import OPTIONS, PROMPTS, SAMPLING, check_plans
from tests.integration.test_cpu_precisions import has_zentorch, in_a_process
from tests.policies import rules

pytestmark = pytest.mark.engine
IN_16_BIT = (2, (EXPERTS,))
"""Layers of a mixture, and what stays in 16 bit."""

LAYERED = rules("- {when: {phase: decode}, use: {default: w4a16, layers: {0: w8a8}}}", "- use: w8a8")
QUANTISED_EXPERTS = rules("- {when: {phase: decode}, use: w4a8}", "- use: w8a8")
QUANTISED_EXPERTS += "derive: {w4a8: {from: w4a16, activations: int8}}\n"
SINGLE_COPY = QUANTISED_EXPERTS.replace("use: w8a8", "use: w4a16")
SERVE = """
import json, sys
from flexquant.evaluation import engine
from flexquant.serving.kernels.cpu_kernels import provide_cpu_kernels
from flexquant.serving.worker.worker_extension import status_of
from vllm import SamplingParams

provide_cpu_kernels()
flexquant = {"policy": sys.argv[2]} if sys.argv[2] else {}
with engine.engine(sys.argv[1], max_model_len=128, enforce_eager=True, flexquant=flexquant) as llm:
    kernels = llm.apply_model(status_of)[0]["kernels"] if flexquant else {}
    outputs = llm.generate(["a", "b c"], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    with open(sys.argv[3], "w") as file:
        json.dump({"kernels": kernels, "answers": [list(o.outputs[0].token_ids) for o in outputs]}, file)
"""


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=[] if name == "qwen3_moe" else pytest.mark.full) for name in MIXTURES],
)
def test_pure_plans_equal_stock_vllm_and_layered_plans_run(architecture, tiny_merged):
    check_plans(tiny_merged(architecture, *IN_16_BIT), LAYERED, "w8a8+w4a16[1]")


def test_equal_experts_exist_once(tiny_merged):
    merged, layers = read_merged_config(tiny_merged("qwen3_moe", *IN_16_BIT) / "merged")
    assert {f"model.layers.{i}.mlp.experts" for i in range(layers)} <= set(merged.shared_modules)
    with engine(tiny_merged("qwen3_moe", *IN_16_BIT) / "merged", "phase") as llm:
        ((same, sizes),) = llm.apply_model(
            lambda model: (
                len({id(v.model.layers[0].mlp.experts.routed_experts) for v in model.variants.values()}),
                model.weight_bytes,
            )
        )
    assert same == 1
    experts_in_16_bit = layers * 8 * 3 * 128 * 64 * 2
    assert sizes["shared"] > experts_in_16_bit > sizes["w8a8"]


def test_a_derived_variant_takes_its_sources_expert_layers_with_shared_experts_in_int4(tiny_merged):
    with engine(tiny_merged("qwen2_moe", *IN_16_BIT) / "merged", SINGLE_COPY, **OPTIONS) as llm:
        (own,) = llm.apply_model(
            lambda model: {
                name
                for name, module in model.variants["w4a8"].model.layers[0].named_modules()
                if module._parameters
                and module is not model.variants["w4a16"].model.layers[0].get_submodule(name)
            }
        )
        assert own == {"self_attn.qkv_proj", "self_attn.o_proj"}
        assert len(answers(llm, PROMPTS, **SAMPLING)) == len(PROMPTS)


@pytest.mark.skipif(not current_platform.is_cpu(), reason="GPUs have kernels for these experts")
def test_int4_experts_that_would_be_w4a8_are_refused(tiny_merged, monkeypatch):
    merged = tiny_merged("qwen3_moe", 2) / "merged"
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "1")
    with pytest.raises(Exception, match=r"experts.*16 bit"), engine(merged, "w4a16"):
        pass


@pytest.mark.skipif(not has_zentorch(), reason="AMD's zentorch is for Zen 4 and later")
def test_quantised_experts_with_zentorch(tiny_merged, tmp_path):
    folder, file = tiny_merged("qwen3_moe", 2), tmp_path / "policy.yaml"
    file.write_text(QUANTISED_EXPERTS)
    both, w8a8, stock = (
        in_a_process(SERVE, folder / model, policy, work=tmp_path, zentorch=True)
        for model, policy in (("merged", file), ("merged", "w8a8"), ("w8a8", ""))
    )
    assert "ZenCPUExpertsInt8" in both["kernels"]["w8a8"]
    assert "ZentorchExpertsInt4" in both["kernels"]["w4a8"]
    assert w8a8["answers"] == stock["answers"]
