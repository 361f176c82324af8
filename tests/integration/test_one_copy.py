# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Published checkpoints in INT4 are served as they are, and in INT8 from one copy of their weights."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file, save_file

from flexquant.checkpoint.merged_config import why_not_served
from flexquant.doctor.examining import examine
from flexquant.evaluation.engine import take_policy
from flexquant.merge import merge_checkpoints
from flexquant.policy.rules import load_policy
from flexquant.serving.worker.one_copy.methods import OneCopyMethod
from tests import programs
from tests.checkpoints import make_checkpoint
from tests.foreign import config_of, write_foreign
from tests.integration.conftest import Served, answers, distance, edited_json, engine, generate
from tests.integration.test_publishers import shift_zero_points
from tests.integration.test_serving_errors import configure, refusal
from tests.policies import DERIVE_INT8, rules
from tests.publishers import edits
from tests.sections import INT4, in_groups

pytestmark = pytest.mark.engine

PROMPTS = ["The capital of France is a city of more than two million people,", "def merge(a, b):"]
SAMPLING = {"max_tokens": 8}
IN_INT8 = rules("- use: w8a8-from-int4") + DERIVE_INT8
ROUTED = DERIVE_INT8 + rules(
    "- {when: {phase: [prefill, mixed]}, use: w8a8-from-int4}",
    '- use: {default: w4a16, layers: {"0": w8a8-from-int4}}',
)
LARGEST = 128 * 2 * 256
"""Weights of the largest linear, gate and up projection together."""
ATTENTION, MLPS = "re:.*self_attn.*", "re:.*mlp.*"
FORMATS = {"compressed-tensors": {}, "awq": {}, "gptq": {"checkpoint_format": "gptq_v2"}}
APART = edits.settings_in("quant_config.json", bits="w_bit", group_size="q_group_size")
ZERO_POINTS = pytest.mark.skipif(
    not hasattr(torch.ops._C, "cpu_gemm_wna16"), reason="on this CPU vLLM has no kernel for zero points"
)
SERVED = [pytest.param(name, marks=ZERO_POINTS if name == "awq" else ()) for name in FORMATS]


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("int4") / "w4a16", "qwen2", "w4a16")


@pytest.fixture(scope="module")
def published(int4: Path) -> dict[str, Path]:
    """Return the checkpoint in each format."""
    others = [name for name in FORMATS if name != "compressed-tensors"]
    written = {name: write_foreign(int4, int4.parent / name, name, **FORMATS[name]) for name in others}
    edits.tensors(shift_zero_points)(written["awq"])
    return {"compressed-tensors": int4, **written}


def write_int8(int4: Path, output: Path) -> Path:
    """Write the W8A8 checkpoint whose weights are those of an INT4 checkpoint, rounded to INT8."""
    make_checkpoint(output, "qwen2", "w8a8")
    file, given = output / "model.safetensors", load_file(int4 / "model.safetensors")
    state = load_file(file)
    for name in [key.removesuffix("_packed") for key in given if key.endswith(".weight_packed")]:
        codes = unpack_from_int32(given[f"{name}_packed"], 4, torch.Size(given[f"{name}_shape"].tolist()))
        scale = given[f"{name}_scale"].float()
        codes = codes.unflatten(1, (scale.shape[1], -1)).float()
        channel = (codes * scale[..., None]).flatten(1).abs().amax(1, keepdim=True) / 127
        weight = codes * (scale * channel.reciprocal())[..., None]
        state |= {name: weight.flatten(1).round().to(torch.int8), f"{name}_scale": channel}
    save_file(state, file, metadata={"format": "pt"})
    return output


def served(folder: Path) -> list[Served]:
    """Return what a checkpoint answers in INT4, in INT8, and by a policy with both."""
    return generate(folder, ["w4a16", IN_INT8, ROUTED], PROMPTS, sampling=SAMPLING)


@pytest.mark.parametrize("name", SERVED)
def test_a_published_checkpoint_is_served_as_it_is(name: str, published: dict[str, Path]) -> None:
    ours = served(published[name])
    (stock,) = generate(published[name], None, PROMPTS, sampling=SAMPLING)
    in_int4, in_int8, routed = (found.answers[0] for found in ours)
    assert distance(in_int4, stock.answers[0]) < 0.01
    assert 0 < distance(in_int8, stock.answers[0]) < 0.2
    plans = {(p["phase"], p["plan"]) for p in ours[2].passes}
    assert plans == {("prefill", "w8a8-from-int4"), ("decode", "w8a8-from-int4+w4a16[1]")}
    assert 0 < distance(routed, in_int8) < 0.2


@pytest.mark.full
@ZERO_POINTS
def test_settings_in_a_file_of_their_own_are_served(published: dict[str, Path], tmp_path: Path) -> None:
    apart = shutil.copytree(published["awq"], tmp_path / "apart")
    APART(apart)
    found, whole = (served(folder)[0] for folder in (apart, published["awq"]))
    (stock,) = generate(apart, None, PROMPTS, sampling=SAMPLING, quantization="awq")
    assert found.answers == whole.answers
    assert distance(found.answers[0], stock.answers[0]) < 0.01


@pytest.mark.full
def test_settings_that_are_left_out_have_defaults(tmp_path: Path) -> None:
    """vLLM by itself has none: groups are of 128, symmetric, and their inputs are in order."""
    int4 = make_checkpoint(tmp_path / "int4", "qwen2", "w4a16", group_size=128)
    bare = write_foreign(int4, tmp_path / "bare", "gptq")
    with edited_json(bare / "config.json") as config:
        config["quantization_config"] = {"quant_method": "gptq", "bits": "4"}
    found, whole = (served(folder)[0] for folder in (bare, int4))
    assert distance(found.answers[0], whole.answers[0]) < 0.01


def test_in_int8_it_answers_as_a_checkpoint_of_the_same_int8_weights(int4: Path, tmp_path: Path) -> None:
    in_int4, in_int8, _ = served(int4)
    (expected,) = generate(write_int8(int4, tmp_path / "w8a8"), None, PROMPTS, sampling=SAMPLING)
    as_int8, as_int4 = (distance(found.answers[0], expected.answers[0]) for found in (in_int8, in_int4))
    assert as_int8 < 0.03 and as_int8 < as_int4 / 2, (as_int8, as_int4)


def test_it_is_served_from_one_copy_by_default_and_its_policy_changes(int4: Path) -> None:
    """The linears of both variants have the same parameters, and their bytes count once."""

    def inspect(model: Any) -> dict[str, Any]:
        source, variant = model.variants["w4a16"], model.variants["w8a8-from-int4"]
        modules = ((m, getattr(m, "quant_method", None)) for m in variant.modules())
        methods = [m for m, method in modules if isinstance(method, OneCopyMethod)]
        tensors = {p.data_ptr() for p in source.parameters()}
        scales = {b.data_ptr(): b.nbytes for m in methods for b in m._buffers.values() if b is not None}
        return {
            "scales": sum(scales.values()),
            "linears": len(methods),
            "own": [n for n, p in variant.named_parameters() if p.data_ptr() not in tensors],
            "bytes": model.weight_bytes,
        }

    answered = []
    with engine(int4, config_format="flexquant") as llm:
        (found,) = llm.apply_model(inspect)
        for policy in ("w4a16", "w8a8-from-int4"):
            take_policy(llm, policy, load_policy(policy).document)
            answered.append(answers(llm, PROMPTS, **SAMPLING))
    assert found["linears"] == 2 * 4 and found["own"] == []
    assert set(found["bytes"]) == {"w4a16", "w8a8-from-int4", "shared"}
    assert found["bytes"]["w8a8-from-int4"] == LARGEST + found["scales"] > LARGEST
    assert found["bytes"]["w4a16"] > found["bytes"]["shared"] == 0, "no other variant has its weights"
    in_int4, in_int8 = answered
    before, after, _ = served(int4)
    assert distance(in_int4, before.answers[0]) < 0.01
    assert distance(in_int8, after.answers[0]) < 0.01 < distance(in_int8, in_int4)


@pytest.mark.full
def test_compiled_it_answers_alike(int4: Path) -> None:
    compiled = generate(int4, ["one-copy"], PROMPTS, sampling=SAMPLING, enforce_eager=False)
    (eager,) = generate(int4, ["one-copy"], PROMPTS, sampling=SAMPLING)
    assert distance(compiled[0].answers[0], eager.answers[0]) < 0.03
    assert {p["plan"] for p in compiled[0].passes} == {"w4a16", "w8a8-from-int4"}


@pytest.mark.full
@pytest.mark.parametrize("name", SERVED)
def test_commands_read_a_published_checkpoint(name: str, published: dict[str, Path]) -> None:
    folder, command = published[name], [sys.executable, "-m", "flexquant"]
    inspected = programs.run([*command, "inspect", folder, "--json"], timeout=120)
    report = json.loads(inspected.stdout.splitlines()[-1])
    assert report["variants"]["w4a16"]["scheme"].startswith("int4 weights")
    assert set(report["loaded"]) == {"w4a16", "shared"}
    examined = programs.run([*command, "doctor", folder], timeout=120, status=None)
    assert "w8a8-from-int4: INT8 from" in examined.stdout, examined.stdout + examined.stderr


@pytest.mark.full
def test_a_merged_checkpoint_takes_it_beside_its_own_w8a8(int4: Path, tmp_path: Path) -> None:
    """Some layers have W8A8 of their own, the others compute it."""
    w8a8 = make_checkpoint(tmp_path / "w8a8", "qwen2", "w8a8")
    merge_checkpoints({"w8a8": w8a8, "w4a16": int4}, tmp_path / "merged")
    mixed = IN_INT8.replace("use: w8a8-from-int4", 'use: {default: w8a8-from-int4, layers: {"1": w8a8}}')
    found = generate(tmp_path / "merged", ["w8a8", IN_INT8, mixed], PROMPTS, sampling=SAMPLING)
    own, computed, both = (each.answers[0] for each in found)
    assert 0 < distance(both, own) < distance(computed, own)


def write_mixed(folder: Path) -> Path:
    """Write a checkpoint with attention in W8A8 and MLPs in W4A16."""
    int4 = make_checkpoint(folder / "int4", "qwen2", "w4a16", ignore=[ATTENTION])
    int8 = make_checkpoint(folder / "int8", "qwen2", "w8a8", ignore=[MLPS])
    state = {n: t for n, t in load_file(int4 / "model.safetensors").items() if ".self_attn." not in n}
    state |= {n: t for n, t in load_file(int8 / "model.safetensors").items() if ".self_attn." in n}
    save_file(state, int4 / "model.safetensors", metadata={"format": "pt"})
    groups = {}
    for made, target in ((int4, MLPS), (int8, ATTENTION)):
        section = config_of(made)["quantization_config"]
        own = {"targets": [target], "format": section["format"]}
        groups[made.name] = section["config_groups"]["group_0"] | own
    edits.section(config_groups=groups, format="mixed-precision", ignore=["lm_head"])(int4)
    return int4


def test_layers_in_8_bit_stay_as_they_are(tmp_path: Path) -> None:
    folder = write_mixed(tmp_path)
    found = [*examine(str(folder), ["--max-model-len", "64"])]
    kernels, (weights,) = ([f for f in found if f.subject == subject] for subject in ("kernel", "weights"))
    in_int8 = [f.text for f in kernels if f.details["variant"] == "w8a8-from-int4"]
    assert [text for text in in_int8 if "qkv_proj" in text and "INT8 from" not in text]
    assert [text for text in in_int8 if "down_proj" in text and "INT8 from" in text]
    factors = 2 * (512 + 128) * 8
    assert weights.details["bytes"]["w8a8-from-int4"] == LARGEST + factors
    (stock,) = generate(folder, None, PROMPTS, sampling=SAMPLING)
    in_int4, computed, _ = (found.answers[0] for found in served(folder))
    assert distance(in_int4, stock.answers[0]) < 0.01
    assert 0 < distance(computed, stock.answers[0]) < 0.2


def test_int4_weights_of_no_layer_are_refused(tmp_path: Path) -> None:
    """The configuration tells of INT4, and all linears of the decoder are in 8 bit."""
    folder = make_checkpoint(tmp_path / "model", "qwen2", "w8a8")
    group = {"targets": ["re:.*elsewhere$"], "weights": INT4 | in_groups(64), "format": "pack-quantized"}
    with edited_json(folder / "config.json") as config:
        config["quantization_config"]["config_groups"]["int4"] = group
    *_, refused = examine(str(folder), ["--max-model-len", "64"])
    assert refused.subject == "refused" and "such as w4a16" in refused.text


def test_a_checkpoint_in_8_bit_is_left_to_vllm(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen2", "w8a8")
    config = configure(folder, config_format="flexquant")
    assert config.model_config.architectures == ["Qwen2ForCausalLM"]
    why = why_not_served(config_of(folder), str(folder))
    assert why is not None and why.startswith(f"{folder} is quantised by compressed-tensors, and FlexQuant")


def test_groups_ordered_by_activation_are_refused(published: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(published["gptq"], tmp_path / "ordered")
    edits.section(desc_act=True)(folder)
    assert "whose groups are ordered by activation" in refusal(folder, config_format="flexquant")


def test_the_default_policy_is_the_built_in_one(int4: Path) -> None:
    assert load_policy("one-copy").derived["w8a8-from-int4"].is_one_copy
