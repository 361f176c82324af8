# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""``flexquant doctor``: what it says without loading weights is what an engine then does."""

import json
import logging
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from vllm.model_executor.model_loader import LoadFormats
from vllm.platforms import current_platform

from flexquant.cli import main
from flexquant.doctor import Finding, built_model
from flexquant.doctor.examining import count_bytes, examine
from flexquant.merge import merge_checkpoints
from flexquant.policy.plans import all_in
from flexquant.policy.rules import load_policy
from flexquant.serving.kernels.cpu_weight_only import TorchCPUInt4LinearKernel
from flexquant.serving.vllm_api import MPLinearLayerConfig, scalar_types
from flexquant.tuning.candidates import FROM_INT4
from tests.checkpoints import EXPERTS, make_checkpoint, make_pair
from tests.integration.conftest import answers, edited_json, engine
from tests.integration.live_server import flexquant_options
from tests.policies import DERIVE_INT8, rules
from tests.programs import run

LENGTH, OVERRIDE = ["--max-model-len", "256"], "--hf-overrides"
LARGE = {
    **{"num_layers": 6, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9},
    **{"num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "tie_word_embeddings": True},
}
"""SmolLM2-135M's sizes, apart from the number of layers."""
BY_NAME = ["auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "dummy"]
"""Load formats whose loaders give a model named tensors, or none."""
FOUR_TWICE = DERIVE_INT8 + rules(
    "- {when: {phase: decode}, use: w4a16}", '- use: {default: w8a8, layers: {"4-5": w8a8-from-int4}}'
)
NESTED_AND_ONE_COPY = DERIVE_INT8 + rules(
    "- {when: {phase: decode}, use: w4a16}", "- {when: {tokens: {max: 8}}, use: w8a8}", f"- use: {FROM_INT4}"
)


def findings(folder: Path, *arguments: str) -> dict[str, list[Finding]]:
    """Return what the doctor finds, keyed by subject."""
    found: dict[str, list[Finding]] = {}
    for finding in examine(str(folder), [*LENGTH, *arguments]):
        found.setdefault(finding.subject, []).append(finding)
    return found


def kernels_of(model: Any) -> dict[str, set[tuple[str, int, int, str]]]:
    """Return the name, inputs, outputs and kernel of every linear layer of each variant, as served."""
    found: dict[str, set[tuple[str, int, int, str]]] = {}
    for variant, module in model.variants.items():
        for name, layer in module.named_modules():
            if hasattr(layer, "scheme"):
                sizes = layer.input_size_per_partition, layer.output_size_per_partition
                shape = name.rsplit(".", 1)[-1], *sizes, type(layer.scheme.kernel).__name__
                found.setdefault(variant, set()).add(shape)
    return found


@pytest.mark.engine
def test_kernels_backend_and_kv_cache_are_those_of_the_engine(merged):
    found = findings(merged)
    with engine(merged, max_model_len=256) as llm:
        (served,) = llm.apply_model(kernels_of)
        cache = llm.llm_engine.vllm_config.cache_config
        blocks, block_size = cache.num_gpu_blocks, cache.block_size
        assert answers(llm, ["an engine after the doctor, in one process"], max_tokens=2)
    told: dict[str, set[tuple[str, int, int, str]]] = {}
    for finding in found["kernel"]:
        shapes = finding.details["shapes"]
        layers = {(s["name"], s["inputs"], s["outputs"], s["kernel"]) for s in shapes}
        told.setdefault(finding.details["variant"], set()).update(layers)
        assert sum(s["layers"] for s in shapes) == 4 * 4, "four linear layers in each of four decoder layers"
    assert told == served
    if current_platform.is_cpu():
        assert found["attention"][0].details["backends"] == ["CPU_ATTN"]
        # A GPU needs memory for activations and graphs too.
        assert found["memory"][0].details["tokens"] // block_size == blocks
    assert found["memory"][0].level == "ok" and "refused" not in found


def test_what_vllm_prefers_is_named_with_the_reason(merged):
    for finding in findings(merged)["kernel"]:
        for shape in finding.details["shapes"]:
            for name, why in shape["better"].items():
                assert name in finding.text and why in finding.text and finding.level == "note"
            assert shape["kernel"] not in shape["better"]


def test_weights_are_those_of_the_checkpoint(merged):
    found = findings(merged)
    (weights,) = found["weights"]
    kernels = {
        s["kernel"] for f in found["kernel"] for s in f.details["shapes"] if f.details["variant"] == "w4a16"
    }
    # Where oneDNN has 16 bit, vLLM packs the head, and keeps it as it was too.
    twice = ["lm_head"] if current_platform.is_cpu() and torch.cpu._is_avx512_supported() else []
    if TorchCPUInt4LinearKernel.__name__ in kernels:  # it keeps zero points beside the scales
        twice.append("w4a16.*weight_scale")
    sizes = {"w8a8": 0, "w4a16": 0, "shared": 0}
    for shard in merged.glob("*.safetensors"):
        for key, tensor in load_file(shard).items():
            if not key.endswith("_shape"):
                copies = 2 if any(re.search(part, key) for part in twice) else 1
                sizes[key.partition(".")[0]] += tensor.nbytes * copies
    for name, size in sizes.items():
        assert weights.details["bytes"][name] == pytest.approx(size, rel=0.05), name
    assert list(weights.details["bytes_by_layers"]["shared"]) == [""], "attention's scales are not kept"
    (remark,) = found["lm_head"]
    assert "'head: int8' in the policy a step reads" in remark.text
    assert "lm_head" not in findings(merged, *flexquant_options(head="int8"))


def test_linears_of_odd_sizes_are_left_in_16_bit(tmp_path):
    """Of 264 inputs; vLLM's products in INT8 take multiples of 16."""
    folder = make_checkpoint(tmp_path / "model", "qwen2", None, intermediate_size=264)
    (file := tmp_path / "p.yaml").write_text(
        "derive: {int8: {from: bf16, activations: int8, weights: int8}}\n" + rules("- use: int8")
    )
    options = ["--config-format", "flexquant", "--additional-config"]
    found = findings(folder, *options, json.dumps({"flexquant": {"policy": str(file)}}))
    shapes = [s for f in found["kernel"] if f.details["variant"] == "int8" for s in f.details["shapes"]]
    assert len(shapes) == 4
    assert [s["name"] for s in shapes if "(16 bit)" in s["kernel"]] == ["down_proj"]


def test_a_second_copy_of_int4_is_said(merged):
    """single-copy loads W4A16 and W4A8, the policy w4a8 W4A8 alone, and one copy has no second one."""
    said = "w4a8 is a second copy of w4a16's INT4 weights"
    for policy, twice in (("single-copy", True), ("w4a8", False), ("one-copy", False)):
        (weights,) = findings(merged, *flexquant_options(policy=policy))["weights"]
        sizes = weights.details["bytes"]
        assert (said in weights.text) == twice == ({"w4a8", "w4a16"} <= sizes.keys()), policy
        if twice:
            assert sizes["w4a8"] == pytest.approx(sizes["w4a16"], rel=0.1)


def test_the_memory_that_computed_weights_are_written_to_counts_once(tmp_path):
    """A pass computes one linear after another: gate_up_proj, of 512 x 128 weights, is the largest."""
    merge_checkpoints(make_pair(tmp_path, "qwen2"), tmp_path / "merged", nested="near")
    (file := tmp_path / "both.yaml").write_text(NESTED_AND_ONE_COPY)

    def sizes(policy):
        (weights,) = findings(tmp_path / "merged", *flexquant_options(policy=str(policy)))["weights"]
        assert set(weights.details["bytes"]) == set(weights.details["bytes_by_layers"])
        return weights.details["bytes"]

    nested, one_copy, both = map(sizes, ("w8a8", "one-copy", file))
    written = nested["w8a8"] - both["w8a8"]
    assert written == one_copy[FROM_INT4] - both[FROM_INT4] == both["shared"] - nested["shared"] == 512 * 128
    loaded = count_bytes(tmp_path / "merged", load_policy(str(file)).document, devices=1)
    plans = [all_in(name, 2) for name in ("w8a8", FROM_INT4, "w4a16")]
    assert loaded.of(plans) == sum(both.values())
    assert loaded.of(plans[:1]) == sum(nested.values())
    assert loaded.of(plans[1:]) - loaded.of(plans[2:]) == one_copy[FROM_INT4]


def test_scales_count_with_the_zero_points_that_pytorchs_kernel_keeps_beside_them(tmp_path, monkeypatch):
    """Scales of groups of 32 are an eighth of INT4 weights, so twice that is seen."""
    if not current_platform.is_cpu():
        pytest.skip("PyTorch's INT4 kernel is for CPUs")
    merge_checkpoints(make_pair(tmp_path, group_size=32), tmp_path / "merged")
    others = "CPUW4A16LinearKernel,ZentorchW4A16LinearKernel,FlexQuantCPUInt4LinearKernel"
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", others)
    found = findings(tmp_path / "merged")
    layouts = 0
    for finding in found["kernel"]:
        for shape in finding.details["shapes"] if finding.details["variant"] == "w4a16" else []:
            assert shape["kernel"] == TorchCPUInt4LinearKernel.__name__
            layouts += shape["layers"] * laid_out(shape["inputs"], shape["outputs"])
    (held,) = (f.details["bytes_by_layers"]["w4a16"]["0-1"] for f in found["weights"])
    assert layouts == pytest.approx(held, rel=0.01) and layouts > 0, "norms and shapes are hardly anything"


def laid_out(inputs: int, outputs: int) -> int:
    """Return the bytes of a linear layer in groups of 32 after PyTorch's INT4 kernel laid it out."""
    layer, sizes = torch.nn.Module(), (inputs, outputs)
    config = MPLinearLayerConfig(sizes, sizes, scalar_types.uint4b8, torch.bfloat16, 32, zero_points=False)
    kernel = TorchCPUInt4LinearKernel(config, "packed", "scale")
    for name, width, dtype in (("packed", 8, torch.int32), ("scale", 32, torch.bfloat16)):
        weight = torch.zeros(outputs, inputs // width, dtype=dtype)
        layer.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
    kernel.process_weights_after_loading(layer)
    return sum(parameter.nbytes for parameter in layer.parameters())


@pytest.mark.engine
def test_weights_are_those_of_the_servers_log(tmp_path, caplog):
    """The model is tied and has a large vocabulary, four layers in two variants, and two in one."""
    merge_checkpoints(make_pair(tmp_path, **LARGE), tmp_path / "merged")
    (policy := tmp_path / "policy.yaml").write_text(FOUR_TWICE)
    (weights,) = findings(tmp_path / "merged", *flexquant_options(policy=str(policy)))["weights"]
    logger = logging.getLogger("vllm.flexquant.model")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger.name)
    try:
        with engine(tmp_path / "merged", str(policy), max_model_len=256):
            pass
    finally:
        logger.removeHandler(caplog.handler)
    # The record comes twice where another test has had vLLM's records handed on to pytest.
    (announced,) = {r.getMessage() for r in caplog.records if " of 16-bit" in r.getMessage()}
    foretold, logged = mebibytes(weights.text), mebibytes(announced)
    assert list(foretold) == ["w8a8 layers 0-3", "w4a16 layers 0-5", "w8a8-from-int4", "shared"]
    assert list(foretold) == list(logged) and foretold == pytest.approx(logged, rel=0.05)


def mebibytes(text: str) -> dict[str, float]:
    """Return the MiB in a text, keyed by variant and layers."""
    found = re.findall(r"([\w-]+(?: layers [\d-]+)?): ([\d.]+) MiB", text)
    return {name: float(size) for name, size in found}


def test_ranks_have_their_share_of_every_shape_or_of_the_layers(merged):
    whole, half = findings(merged), findings(merged, "--tensor-parallel-size", "2")
    for one, two in zip(whole["kernel"], half["kernel"], strict=True):
        for a, b in zip(one.details["shapes"], two.details["shapes"], strict=True):
            assert a["inputs"] * a["outputs"] == 2 * b["inputs"] * b["outputs"], a["name"]
    assert half["memory"][0].details["bytes_per_token"] * 2 == whole["memory"][0].details["bytes_per_token"]
    for finding in findings(merged, "--pipeline-parallel-size", "2")["kernel"]:
        assert sum(shape["layers"] for shape in finding.details["shapes"]) == 4 * 2


FAR = "--master-addr 10.1.2.3 --nnodes 2"
OTHER_RANKS = {
    "--data-parallel-size 2": 2,
    "--data-parallel-size 2 --data-parallel-size-local 1 --data-parallel-address 10.1.2.3": 2,
    "-dp 2 --data-parallel-size-local 1 --data-parallel-hybrid-lb --data-parallel-start-rank 1": 2,
    f"--tensor-parallel-size 2 {FAR}": 2,
    f"--tensor-parallel-size 2 --data-parallel-size 2 {FAR} --node-rank 1": 4,
    "--tensor-parallel-size 2 --distributed-executor-backend external_launcher": 2,
}
"""Arguments with which a server waits for ranks that others start -> number of ranks."""


@pytest.mark.parametrize("arguments", OTHER_RANKS)
def test_one_rank_is_examined_without_waiting_for_others(arguments, merged):
    found = findings(merged, *arguments.split())
    assert found["ranks"][0].details["ranks"] == OTHER_RANKS[arguments]
    alone = ["--tensor-parallel-size", "2"] if "tensor" in arguments else []
    assert "refused" not in found and found["weights"] == findings(merged, *alone)["weights"]


def test_ranks_with_data_of_their_own_share_experts(tiny_merged):
    folder = tiny_merged("qwen3_moe", 2, (EXPERTS,)) / "merged"
    alone = flexquant_options(policy="w8a8")
    two = [*alone, "--data-parallel-size", "2"]
    whole, half, apart = (findings(folder, *a) for a in (alone, two, [*two, "--enable-expert-parallel"]))
    sizes = [found["weights"][0].details["bytes"]["w8a8"] for found in (whole, half)]
    assert sizes[1] < 0.7 * sizes[0]
    assert apart["experts"][0].level == "note" and "weights" not in apart and "refused" not in apart


@pytest.mark.skipif(not current_platform.is_cpu(), reason="Triton compiles for a GPU")
@pytest.mark.parametrize("left", [0, 1])
def test_threads_on_all_cores_leave_none_to_the_front_end(left, merged, monkeypatch):
    cores = sorted(os.sched_getaffinity(0))
    bound = [f"{cores[0]}-{cores[0]}", *map(str, cores[1:])][left:]
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", ",".join(bound) or "auto")
    found = findings(merged).get("cores", [])
    assert [finding.level for finding in found] == ["note"][left:]


@pytest.mark.parametrize("compiler", ["no such compiler", "false", "g++"])
def test_a_server_that_compiles_needs_a_compiler(compiler, merged, monkeypatch):
    monkeypatch.setenv("CXX", compiler)
    found = findings(merged).get("compiler", [])
    assert [finding.level for finding in found] == ([] if compiler == "g++" else ["problem"])
    assert all("; install g++ and" in f.text and "or serve with --enforce-eager" in f.text for f in found)
    assert "compiler" not in findings(merged, "--enforce-eager")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (flexquant_options(policy="fastest"), "unknown policy 'fastest'"),
        (["--pipeline-parallel-size", "8"], "none of the model's 4 decoder layers"),
        (["--port", "1", "--fast"], "--port"),
        *[
            (["--load-format", name], f"load format '{name}', which does not read safetensors by their names")
            for name in sorted({*get_args(LoadFormats), "gguf", "bitsandbytes"} - set(BY_NAME))
        ],
        ([OVERRIDE, '{"architectures": ["LlamaForCausalLM"]}'], "leave 'architectures' out of --hf"),
        ([OVERRIDE, '{"quantization_config": null}'], "not a merged checkpoint: quant_method is None"),
    ],
)
def test_what_would_be_refused(arguments, said, merged):
    (refused,) = findings(merged, *arguments)["refused"]
    assert refused.level == "problem" and said in refused.text


@pytest.mark.parametrize("name", BY_NAME)
def test_load_formats_that_read_tensors_by_name_are_taken(name, merged):
    assert "refused" not in findings(merged, "--load-format", name)


def test_experts_are_no_attention_layers(tiny_merged):
    """vLLM registers them beside those, as it looks both up by name."""
    found = findings(tiny_merged("qwen3_moe", 2, (EXPERTS,)) / "merged")
    assert "refused" not in found, found["refused"][0].text
    whole = findings(tiny_merged() / "merged")
    assert found["attention"][0].text == whole["attention"][0].text
    assert found["memory"][0].details["bytes_per_token"] * 2 == whole["memory"][0].details["bytes_per_token"]


def test_too_little_memory(merged, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4000")
    options = [] if current_platform.is_cpu() else ["--kv-cache-memory-bytes", "4e12"]
    (memory,) = findings(merged, *options)["memory"]
    assert memory.level == "problem" and "--max-model-len" in memory.text


def test_a_request_and_the_weights_must_fit_into_memory_to_the_byte(merged, monkeypatch):
    if not current_platform.is_cpu():
        pytest.skip("the memory of a GPU is not the test's")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    found = findings(merged)
    weights = sum(found["weights"][0].details["bytes"].values())
    request, large = 256 * found["memory"][0].details["bytes_per_token"], 1 << 40
    for option, value, free, total, level in (
        ("--kv-cache-memory-bytes", request, request + weights, large, "ok"),
        ("--kv-cache-memory-bytes", request, request + weights - 1, large, "problem"),
        ("--kv-cache-memory-bytes", request - 1, large, large, "problem"),
        ("--gpu-memory-utilization", 0.5, large, 2 * (request + weights), "ok"),
        ("--gpu-memory-utilization", 0.5, large, 2 * (request + weights) - 1, "problem"),
    ):
        machine = SimpleNamespace(available=free, total=total)
        monkeypatch.setattr(built_model, "psutil", SimpleNamespace(virtual_memory=lambda m=machine: m))
        (memory,) = findings(merged, option, str(value))["memory"]
        assert memory.level == level, (option, value, memory.text)


def test_caches_that_cannot_be_shared_are_said_whatever_the_policy(merged, tmp_path):
    folder = shutil.copytree(merged, tmp_path / "merged")
    with edited_json(folder / "config.json") as config:
        config["quantization_config"]["kv_compatibility"] |= {"compatible": False, "message": "K is doubled"}
    for given, refused in (({}, True), ({"policy": "w8a8"}, False), ({"allow_incompatible_kv": True}, False)):
        found = findings(folder, *flexquant_options(**given))
        (note,) = found["KV cache"]
        assert note.level == "note" and "K is doubled" in note.text
        assert ("refused" in found) == refused


def test_the_command_takes_what_vllm_serve_gets(merged, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert main(["doctor", str(merged)]) == 0
    assert main(["doctor", str(merged), "--", "--pipeline-parallel-size", "8"]) == 1
    assert "none of the model's 4 decoder layers" in capsys.readouterr().out
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_the_command_tells_a_folder_that_is_no_checkpoint(tmp_path, merged):
    broken = shutil.copytree(merged, tmp_path / "broken")
    (broken / "config.json").write_text("{")
    program = Path(sys.executable).parent / "flexquant"
    done = run([program, "doctor", broken, "--json"], timeout=120, status=1)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["failed"] and result["findings"][-1]["subject"] == "refused"
    assert "config.json" in done.stdout
