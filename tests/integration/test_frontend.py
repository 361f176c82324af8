# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What the front end makes of vLLM's configuration: the policy's table, settings of vLLM, a verification.

Workers get the table, and never look at the policy's file. With ``verify``, a checkpoint that is not what the
merge wrote is refused. What vLLM switches by a checkpoint's quantisation is as for the variants' own.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from vllm import EngineArgs

from examples.vllm_server import vllm_serve
from flexquant.checkpoint.merged_config import MergedConfig
from flexquant.checkpoint.model_config import JsonObject
from flexquant.errors import FlexQuantError
from flexquant.serving.config import ServedPolicy, clip_to_server
from flexquant.serving.registration import verify_if_asked
from tests.checkpoints import flip_a_byte
from tests.integration.conftest import answers, edited_json, engine, records_of
from tests.integration.live_server import flexquant_options
from tests.integration.test_serving_errors import configure, flexquant, refusal
from tests.policies import rules


def batches(most: int) -> str:
    return rules(f"- {{when: {{phase: decode, batch_size: {{max: {most}}}}}, use: w4a16}}", "- use: w8a8")


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    (tmp_path / "policy.yaml").write_text(batches(8))
    return tmp_path / "policy.yaml"


@pytest.fixture
def configured(policy: Path, tiny_merged: Any) -> Any:
    return configure(tiny_merged() / "merged", additional_config=with_policy(policy))


def with_policy(policy: Path) -> dict[str, Any]:
    return {"flexquant": {"policy": str(policy)}, "of another plugin": 1}


@pytest.mark.engine
def test_a_file_that_changes_once_it_is_read_changes_nothing(policy, tiny_merged, tmp_path, monkeypatch):
    """Another file takes its place before a worker gets vLLM's configuration."""
    build, trace = EngineArgs.create_engine_config, tmp_path / "trace.jsonl"

    def create_engine_config(*args: Any, **kwargs: Any) -> Any:
        config = build(*args, **kwargs)
        policy.write_text(batches(1))
        return config

    monkeypatch.setattr(EngineArgs, "create_engine_config", create_engine_config)
    options = {"max_model_len": 256, "flexquant": {"trace": str(trace)}}
    with engine(tiny_merged() / "merged", str(policy), **options) as llm:
        answers(llm, ["one prompt", "another prompt"], max_tokens=4, ignore_eos=True)
    header, *passes = records_of(trace)
    assert header["policy"] == str(policy)
    assert {(p["sequences"], p["plan"]) for p in passes if p["phase"] == "decode"} == {(2, "w4a16")}


def merged_of(config: Any) -> MergedConfig:
    return MergedConfig.from_json(config.model_config.hf_config.quantization_config)


def test_the_workers_configuration_holds_the_table_beside_the_users_options(configured, policy):
    """The worker needs no file."""
    assert configured.additional_config["flexquant"] == {"policy": str(policy)}
    assert configured.additional_config["of another plugin"] == 1
    json.dumps(configured.additional_config)  # as vLLM hashes it
    policy.unlink()
    served = ServedPolicy.from_vllm(configured)
    assert (served.name, served.routes.lookup("decode", 8).name) == (str(policy), "w4a16")
    sequences = configured.scheduler_config.max_num_seqs
    clipped = clip_to_server(configured, merged_of(configured), served).routes
    assert served.routes.intervals("decode")[-1].max_tokens > sequences
    assert clipped.intervals("decode")[-1].max_tokens == sequences


def test_options_of_a_server_go_before_the_policy(policy, tiny_merged, monkeypatch):
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "1")
    policy.write_text(batches(8) + "head: int8\n")
    config = configure(tiny_merged() / "merged", **flexquant(policy=str(policy), head="stored"))
    assert ServedPolicy.from_vllm(config).routes.head == "stored"
    configure(tiny_merged() / "merged", **flexquant(policy="w4a8", kernels={"w4a8": "marlin"}))
    assert os.environ["VLLM_USE_AOT_COMPILE"] == "1"


def test_a_worker_serves_decode_passes_up_to_the_size_of_graphs_that_vllm_sets_last(policy, tiny_merged):
    policy.write_text(batches(300))
    config = configure(tiny_merged() / "merged", additional_config=with_policy(policy), max_num_seqs=300)
    served, found = ServedPolicy.from_vllm(config), []
    for sizes in ([], [256, 300, 512], [256, 304, 512]):
        config.compilation_config.cudagraph_capture_sizes = sizes
        rows = clip_to_server(config, merged_of(config), served).routes.intervals("decode")
        found.append([(row.max_tokens, row.plan.name) for row in rows])
    assert found == [*[[(300, "w4a16")]] * 2, [(300, "w4a16"), (304, "w8a8")]]


def test_a_configuration_without_a_policy_is_refused_by_the_worker(configured, policy):
    configured.additional_config = {"flexquant": {"policy": str(policy)}}
    with pytest.raises(FlexQuantError, match="create_engine_config"):
        ServedPolicy.from_vllm(configured)


NORM, SHARD = "shared.model.norm.weight", "model-00001-of-00003.safetensors"


def test_a_flipped_byte_is_refused_with_its_shard_and_another_tokenizer(merged, tmp_path):
    flipped, edited = (shutil.copytree(merged, tmp_path / name) for name in ("flipped", "edited"))
    assert flip_a_byte(flipped, NORM) == SHARD
    message = refusal(flipped, **flexquant(verify=True))
    assert f"({NORM} in {SHARD}); fetch or merge the checkpoint again" in message
    for options in ({}, {"verify": False}):  # who does not ask gets it served
        configure(flipped, **flexquant(**options))
    with open(edited / "tokenizer_config.json", "a") as file:
        file.write("\n")
    assert "tokenizer_config.json was changed after merging" in refusal(edited, **flexquant(verify=True))


def test_what_the_merge_wrote_is_accepted_and_a_model_that_is_no_folder_refused(merged):
    config = configure(merged, **flexquant(verify=True))
    assert config.additional_config["flexquant"] == {"verify": True}
    config.model_config.model = "somebody/something"
    with pytest.raises(
        FlexQuantError, match="needs a folder on this machine, and somebody/something is none"
    ):
        verify_if_asked(config)


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.parametrize("servers", [1, 2])
def test_a_server_verifies_once(merged, tmp_path, servers, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")  # vLLM logs at this level what it has verified
    log, arguments = tmp_path / "log", [*flexquant_options(verify=True), "--api-server-count", str(servers)]
    with vllm_serve(merged, *arguments, "--enforce-eager", "--max-model-len", "256", log=log):
        pass
    written = log.read_text()
    assert "EngineCore" in written and written.count("tensors equal to recorded hashes") == 1


FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
BLOCKS = {
    "weights": {**FP8, "strategy": "block", "block_structure": [128, 128]},
    "input_activations": {**FP8, "strategy": "group", "group_size": 128, "dynamic": True},
}
BLOCK_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


def stored(merged: Path, folder: Path, section: JsonObject, **config: Any) -> Path:
    shutil.copytree(merged, folder)
    with edited_json(folder / "config.json") as whole:
        whole |= {**config, "quantization_config": section}
    return folder


def with_variant(merged: Path, folder: Path, **scheme: Any) -> Path:
    """Return a merged checkpoint whose variant ``w8a8`` says that it is quantised in another way."""
    section = json.loads((merged / "config.json").read_text())["quantization_config"]
    group = {"targets": ["Linear"], **{key: scheme.pop(key) for key in BLOCKS if key in scheme}}
    of_w8a8 = section["variants"]["w8a8"]["quantization_config"]
    of_w8a8 |= {**scheme, "config_groups": {"group_0": group}}
    return stored(merged, folder, section)


def has_quant_fp8(folder: Path, **options: Any) -> bool:
    return "+quant_fp8" in configure(folder, **options).compilation_config.custom_ops


def fuses_activations(folder: Path, asked: JsonObject | None = None, **options: Any) -> bool:
    """Whether vLLM fuses activations and their quantisation where Inductor may fuse all that it can."""
    compilation = {"custom_ops": ["none"], "pass_config": asked or {}}
    found = configure(folder, compilation_config=compilation, **options)
    return bool(found.compilation_config.pass_config.fuse_act_quant)


def test_blocks_of_fp8_are_quantised_by_the_operator_that_vllm_takes_for_them(merged, tmp_path):
    own = stored(merged, tmp_path / "own", BLOCK_FP8, architectures=["LlamaForCausalLM"])
    blocks = with_variant(merged, tmp_path / "blocks", **BLOCKS)
    assert has_quant_fp8(own) and has_quant_fp8(blocks, **flexquant(policy="phase"))
    assert not has_quant_fp8(merged, **flexquant(policy="phase"))


def test_activations_are_fused_as_for_a_checkpoint_in_nvfp4(merged, tmp_path):
    fp4 = {"format": "nvfp4-pack-quantized", "weights": FP4, "input_activations": {**FP4, "dynamic": "local"}}
    variant = with_variant(merged, tmp_path / "fp4", **fp4)
    section = json.loads((variant / "config.json").read_text())["quantization_config"]["variants"]["w8a8"]
    own = stored(merged, tmp_path / "own", section["quantization_config"], architectures=["LlamaForCausalLM"])
    assert fuses_activations(own) and fuses_activations(variant, **flexquant(policy="phase"))
    assert not fuses_activations(merged, **flexquant(policy="phase"))
    assert not fuses_activations(variant, **flexquant(policy="w4a16")), "nothing is served in NVFP4"
    assert not fuses_activations(variant, {"fuse_act_quant": False}, **flexquant(policy="phase"))
    assert not fuses_activations(variant, **flexquant(policy="phase"), optimization_level=0)
