# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Mixtures of experts, and layers that keep a state: every variant has its own, and equal experts exist once.

All variants read and write one state. Two variants of equal weights show it exactly: whatever plans the
passes take, answers are stock vLLM's.
"""

import itertools
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm import SamplingParams
from vllm.platforms import current_platform

from flexquant.checkpoint.merged_config import read_merged_config
from flexquant.cli import main
from flexquant.merge import merge_checkpoints
from flexquant.serving.vllm_api import MambaBase
from tests import programs
from tests.checkpoints import EXPERTS, MIXTURES
from tests.conftest import rest_full
from tests.integration.conftest import answers, change, check_variants, distance, engine, generate
from tests.integration.test_architectures import LAYERED, OPTIONS, PROMPTS, SAMPLING, check_plans
from tests.integration.test_precisions import has_zentorch, in_a_process
from tests.policies import rules
from tests.states import FAMILIES, make_variants, merge_twins

pytestmark = pytest.mark.engine
IN_16_BIT = (2, (EXPERTS,))
"""Layers of a mixture, and what stays in 16 bit."""

FIRST_IN_INT8 = rules("- {when: {phase: decode}, use: {default: w4a16, layers: {0: w8a8}}}", "- use: w8a8")
QUANTISED_EXPERTS = rules("- {when: {phase: decode}, use: w4a8}", "- use: w8a8")
QUANTISED_EXPERTS += "derive: {w4a8: {from: w4a16, activations: int8}}\n"
SINGLE_COPY = QUANTISED_EXPERTS.replace("use: w8a8", "use: w4a16")
SERVE = """
import json, sys
from flexquant.evaluation.engine import engine, take_policy
from flexquant.serving.kernels.cpu_kernels import provide_cpu_kernels
from flexquant.serving.worker.worker_extension import status_of
from vllm import SamplingParams

def answers(llm):
    outputs = llm.generate(["a", "b c"], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]

merged, policy, static, reply = sys.argv[1:]
options = {"max_model_len": 128, "enforce_eager": True}
provide_cpu_kernels()
with engine(merged, flexquant={"policy": policy}, **options) as llm:
    found = {"kernels": llm.apply_model(status_of)[0]["kernels"], "w4a8": answers(llm)}
    take_policy(llm, "w8a8", {"schema": "flexquant.policy/v1", "rules": [{"use": "w8a8"}]})
    found["served"] = answers(llm)
with engine(static, **options) as llm:
    found["stock"] = answers(llm)
with open(reply, "w") as file:
    json.dump(found, file)
"""


@pytest.mark.parametrize("architecture", rest_full(MIXTURES, "qwen3_moe"))
def test_plans_of_experts_equal_stock_vllm_and_layered_plans_run(architecture, tiny_merged):
    check_plans(tiny_merged(architecture, *IN_16_BIT), FIRST_IN_INT8, "w8a8+w4a16[1]")


def test_equal_experts_exist_once(tiny_merged):
    merged, layers = read_merged_config(tiny_merged("qwen3_moe", *IN_16_BIT) / "merged")
    assert {f"model.layers.{i}.mlp.experts" for i in range(layers)} <= set(merged.shared_modules)
    with engine(tiny_merged("qwen3_moe", *IN_16_BIT) / "merged", "phase") as llm:
        (variants,) = llm.apply_model(lambda model: [*model.variants.values()])
        assert len({id(v.model.layers[0].mlp.experts.routed_experts) for v in variants}) == 1
        (sizes,) = llm.apply_model(lambda model: model.weight_bytes)
    experts_in_16_bit = layers * 8 * 3 * 128 * 64 * 2
    assert sizes["shared"] > experts_in_16_bit > sizes["w8a8"]


def test_a_derived_variant_takes_its_sources_expert_layers_with_shared_experts_in_int4(tiny_merged):
    with engine(tiny_merged("qwen2_moe", *IN_16_BIT) / "merged", SINGLE_COPY, **OPTIONS) as llm:
        (variants,) = llm.apply_model(lambda model: model.variants)
        derived, source = (variants[name].model.layers[0] for name in ("w4a8", "w4a16"))
        modules = ((name, module) for name, module in derived.named_modules() if module._parameters)
        own = {name for name, module in modules if module is not source.get_submodule(name)}
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
    found = in_a_process(SERVE, folder / "merged", file, folder / "w8a8", work=tmp_path, zentorch=True)
    assert "ZenCPUExpertsInt8" in found["kernels"]["w8a8"]
    assert "ZentorchExpertsInt4" in found["kernels"]["w4a8"] and len(found["w4a8"][0]) == 8
    assert found["served"] == found["stock"], "or the second engine has packed weights of the first"


OPPOSITE = yaml.safe_load(rules("- {when: {phase: decode}, use: first}", "- use: second"))
LONG = [f"{i} is how this prompt of more tokens than a block of the cache begins, " * 4 for i in range(4)]
MANY = {"max_tokens": 24, "ignore_eos": True}
families = pytest.mark.parametrize("kind", rest_full(FAMILIES, "qwen3_next"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a function: family -> folder of w8a8, w4a16, both merged, and twins."""
    folders: dict[str, Path] = {}

    def make(kind: str = "qwen3_next") -> Path:
        if kind not in folders:
            folder = folders[kind] = make_variants(tmp_path_factory.mktemp(kind), kind)
            merge_checkpoints({name: folder / name for name in ("w8a8", "w4a16")}, folder / "merged")
            merge_twins(folder)
        return folders[kind]

    return make


@families
def test_pure_plans_equal_stock_vllm_and_layered_plans_run(kind, made):
    check_plans(made(kind), LAYERED, "w8a8+w4a16[1-2]")


def caches(llm: Any) -> tuple[list[list[str]], int, int]:
    """Return the layers of each group of the KV cache, its number of blocks, and its bytes."""

    def look(worker: Any) -> Any:
        config = worker.model_runner.kv_cache_config
        layers = worker.vllm_config.compilation_config.static_forward_context.values()
        held = [layer.kv_cache for layer in layers if hasattr(layer, "kv_cache")]
        memory = [part.untyped_storage() for one in held for part in (one if type(one) is tuple else [one])]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in memory}
        return [group.layer_names for group in config.kv_cache_groups], config.num_blocks, sum(sizes.values())

    (found,) = llm.collective_rpc(look)
    return found


@families
@pytest.mark.parametrize(
    ("options", "rounds"),
    [
        ({}, 2),
        pytest.param({"enforce_eager": False}, 1, marks=pytest.mark.full),
        pytest.param({"enable_prefix_caching": False}, 1, marks=pytest.mark.full),
    ],
    ids=["eager", "compiled", "without-prefix-caching"],
)
def test_a_variant_goes_on_from_the_state_that_another_wrote(kind, options, rounds, made):
    """Prompts come in chunks; in a second round most of them is in the prefix cache, states included."""
    asked, found = [PROMPTS + LONG] * rounds, []
    for checkpoint in ("w8a8", "twins"):
        with engine(made(kind) / checkpoint, **OPTIONS | {"disable_log_stats": False} | options) as llm:
            given = [answers(llm, prompts, **MANY) for prompts in asked]
            found.append((given, caches(llm), metric(llm, "prefix_cache_hits")))
    stock, twins = found
    assert twins == stock and (stock[2] > 0) == (rounds > 1)


def metric(llm: Any, name: str) -> int:
    (found,) = (m.value for m in llm.llm_engine.get_metrics() if m.name == f"vllm:{name}")
    return found


@pytest.mark.full
def test_answers_of_two_precisions_on_one_state_are_near_to_both(made):
    """A prompt begins in one precision, whose state the other reads for the last tokens of the prompt."""
    there, back = (
        rules(f"- {{when: {{tokens: {{max: 40}}}}, use: {end}}}", f"- use: {begin}")
        for begin, end in (("w8a8", "w4a16"), ("w4a16", "w8a8"))
    )
    one = {"max_tokens": 1, "logprobs": 20}
    policies = ["w8a8", "w4a16", there, back]
    served = generate(made() / "merged", policies, *([p] for p in LONG), sampling=one, **OPTIONS)
    w8a8, w4a16, begun_in_w8a8, begun_in_w4a16 = ([found[0] for found in s.answers] for s in served)
    assert {tuple(p["plan"] for p in served[2].passes[:5])} == {("w8a8",) * 4 + ("w4a16",)}
    apart = distance(w8a8, w4a16)
    for mixed in (begun_in_w8a8, begun_in_w4a16):
        assert 0 < distance(mixed, w8a8) < 1.5 * apart
        assert 0 < distance(mixed, w4a16) < 1.5 * apart


@pytest.mark.parametrize("weights", rest_full(("", ", weights: int8"), ""), ids=["w4a8", "one-copy"])
@pytest.mark.parametrize("kind", rest_full(("qwen3_next", "lfm2"), "qwen3_next"))
def test_a_derived_variant_computes_with_its_own_linears_on_the_same_state(kind, weights, made):
    """LFM2's layers call their linears where vLLM has looked the layers up by name."""
    policy = rules("- {when: {phase: decode}, use: w4a16}", "- use: derived")
    policy += f"derive: {{derived: {{from: w4a16, activations: int8{weights}}}}}\n"
    calls: Counter[tuple[str, str]] = Counter()
    with engine(made(kind) / "merged", policy, **OPTIONS) as llm:

        def watch(model: Any) -> None:
            for variant in ("w4a16", "derived"):
                for linear in sum(map(linears, layers_with_state(model.variants[variant])), []):
                    called = {id(linear): (variant, type(linear.quant_method).__name__)}
                    linear.register_forward_hook(
                        lambda m, *_, called=called: calls.update([called.get(id(m))])
                    )

        llm.apply_model(watch)
        answers(llm, ["one"], **SAMPLING)
        (variants,) = llm.apply_model(lambda model: model.variants.values())
        states = [[id(layer.kv_cache) for layer in layers_with_state(variant)] for variant in variants]
    del calls[None]
    by_variant = {variant: count for (variant, _), count in calls.items()}
    assert by_variant["w4a16"] == (SAMPLING["max_tokens"] - 1) * by_variant["derived"]
    assert states[0] == states[1]


@pytest.mark.full
def test_a_derived_variant_has_its_own_convolutions(made):
    """Falcon-H1's layers hold views of their convolutions' weights; its answers are near to its source's."""
    policies, one = ["w8a8", "w4a16", "w4a8"], {"max_tokens": 1, "logprobs": 20}
    served = generate(made("falcon_h1") / "merged", policies, PROMPTS, sampling=one, **OPTIONS)
    w8a8, w4a16, w4a8 = (found.answers[0] for found in served)
    assert 0 < distance(w4a8, w4a16) < distance(w8a8, w4a16)


@pytest.mark.full
def test_policies_are_evaluated(made, tmp_path):
    text = programs.ROOT / "README.md"
    command = ["eval", made() / "merged", "--reference", made() / "model", "--text", text]
    command += ["--policies", "w8a8,w4a16,phase", "--batch-sizes", 8, "--samples", 8, "--output", tmp_path]
    assert main([*map(str, command), "--prompt-tokens", "64", "--tokens", "16", "--answer-tokens", "8"]) == 0
    _, *found = json.loads((tmp_path / "quality.json").read_text())["results"]
    w8a8, w4a16, phase = (result["quality"]["mean_kl"] for result in found)
    assert 0 < w8a8 < phase < 1.5 * w4a16


@pytest.mark.full
def test_a_policy_is_tuned_and_served(made, tmp_path):
    """One round, which no noise can call undecided."""
    few = ["--quick", "--max-batch", 4, "--max-tokens", 64, "--rounds", 1]
    command = [sys.executable, "-m", "flexquant", "tune", made() / "merged", "--output", tmp_path / "p.yaml"]
    programs.run([*command, *few], timeout=600)
    (served,) = generate(made() / "merged", [str(tmp_path / "p.yaml")], PROMPTS, sampling=SAMPLING, **OPTIONS)
    assert {found["plan"] for found in served.passes} <= {"w8a8", "w4a16"}


def layers_with_state(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, MambaBase)]


def linears(layer: Any) -> list[Any]:
    """Return the linears of a layer whose weights are in INT4 in W4A16."""
    return [module for module in layer.modules() if hasattr(module, "weight_packed")]


@pytest.mark.full
def test_gates_that_one_variant_alone_quantises_are_its_own(tmp_path):
    """Publishers leave these projections in 16 bit, or they do not."""
    folder = make_variants(tmp_path, "qwen3_next", {"w8a8": "linear_attn.out_proj", "w4a16": "in_proj_qkvz"})
    sources = {name: folder / name for name in ("w8a8", "w4a16")}
    merge_checkpoints(sources, folder / "merged")
    check_variants(folder / "merged", sources, PROMPTS, sampling=SAMPLING, **OPTIONS)


@pytest.mark.full
def test_a_block_that_cannot_hold_a_state_becomes_as_large_as_stock_vllm_makes_it(made):
    def block(checkpoint: str) -> int:
        with engine(made() / checkpoint, **OPTIONS, block_size=32) as llm:
            return llm.collective_rpc(lambda worker: worker.vllm_config.cache_config.block_size)[0]

    assert block("twins") == block("w8a8") > 32


def test_a_policy_change_on_the_way_and_preemption_leave_no_trace(made):
    """Prompts of several blocks are decoded into more blocks than there are."""
    options = OPTIONS | {"num_gpu_blocks_override": 20, "disable_log_stats": False}
    parameters = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)

    def serve(checkpoint: str, change_at: int | None) -> tuple[dict[str, list[int]], int]:
        tokens: dict[str, list[int]] = {}
        with engine(made() / checkpoint, **options) as llm:
            for number, prompt in enumerate(LONG):
                llm.llm_engine.add_request(f"{number}", prompt, parameters)
            for steps in itertools.count(1):
                for output in llm.llm_engine.step():
                    tokens[output.request_id] = list(output.outputs[0].token_ids)
                if not llm.llm_engine.has_unfinished_requests():
                    break
                if steps == change_at:
                    assert "refused" not in change(llm, "other", OPPOSITE)
            return tokens, metric(llm, "num_preemptions")

    undisturbed = serve("w8a8", None)
    assert undisturbed[1] > 0 and serve("twins", 60) == undisturbed
