# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""``flexquant doctor``: what it says without loading weights is what an engine then does."""

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from vllm.model_executor.model_loader import LoadFormats
from vllm.platforms import current_platform

from flexquant.cli import main
from flexquant.doctor import Finding, built_model
from flexquant.doctor.examining import examine
from tests.checkpoints import EXPERTS, make_checkpoint
from tests.integration.conftest import answers, edited_json, engine
from tests.integration.live_server import flexquant_options
from tests.policies import rules
from tests.programs import run

LENGTH, OVERRIDE = ["--max-model-len", "256"], "--hf-overrides"
BY_NAME = ["auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "dummy"]
"""Load formats whose loaders give a model named tensors, or none."""


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
    with engine(merged, max_model_len=256, num_gpu_blocks_override=None) as llm:
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


def test_a_window_takes_what_vllm_keeps_of_it(tiny_merged):
    folder, lengths = tiny_merged("gemma2") / "merged", ("--max-num-batched-tokens", "128", "--max-model-len")
    short, long = (findings(folder, *lengths, n)["memory"][0].details for n in ("256", "1024"))
    assert long["bytes_per_token"] < 0.8 * short["bytes_per_token"]


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
    assert main(["doctor", str(merged), "--", "--max-model-len", "many"]) == 1
    assert "argument --max-model-len" in capsys.readouterr().out
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_the_command_tells_a_folder_that_is_no_checkpoint(tmp_path, merged):
    broken = shutil.copytree(merged, tmp_path / "broken")
    (broken / "config.json").write_text("{")
    program = Path(sys.executable).parent / "flexquant"
    done = run([program, "doctor", broken, "--json"], timeout=120, status=1)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["failed"] and result["findings"][-1]["subject"] == "refused"
    assert "config.json" in done.stdout
