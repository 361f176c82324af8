# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The front end resolves the policy once; workers get its table, and never look at the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm import EngineArgs

from flexquant.checkpoint.merged_config import MergedConfig
from flexquant.errors import FlexQuantError
from flexquant.serving.config import ServedPolicy, clip_to_server
from tests.integration.conftest import answers, engine

BATCHES = """
schema: flexquant.policy/v1
description: {description}
rules:
  - when: {{phase: decode, batch_size: {{max: {most}}}}}
    use: w4a16
  - use: w8a8
"""


@contextmanager
def when_the_front_end_has_read(change: Callable[[], Any]) -> Iterator[None]:
    """Run ``change`` after vLLM's front end has built its configuration, before a worker gets it."""
    build = EngineArgs.create_engine_config

    def create_engine_config(*args: Any, **kwargs: Any) -> Any:
        config = build(*args, **kwargs)
        change()
        return config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineArgs, "create_engine_config", create_engine_config)
        yield


def routes(policy: Path, folder: Path, tmp_path: Path, change: Callable[[], Any]) -> list[dict[str, Any]]:
    """Return the trace of two prompts side by side, with its first line, which says what is served."""
    trace = tmp_path / "trace.jsonl"
    options = {"max_model_len": 256, "flexquant": {"trace": str(trace)}}
    with when_the_front_end_has_read(change), engine(folder, str(policy), **options) as llm:
        answers(llm, ["one prompt", "another prompt"], max_tokens=4, ignore_eos=True)
    return [json.loads(line) for line in trace.read_text().splitlines()]


@pytest.mark.engine
@pytest.mark.parametrize("change", ["replaced", "deleted"])
def test_a_file_that_changes_after_the_front_end_has_read_it_changes_nothing(change, tiny_merged, tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text(BATCHES.format(description="before", most=8))
    changes = {
        "replaced": lambda: policy.write_text(BATCHES.format(description="after", most=1)),
        "deleted": policy.unlink,
    }
    header, *passes = routes(policy, tiny_merged() / "merged", tmp_path, changes[change])
    assert header["policy"] == str(policy)
    decode = [p for p in passes if p["phase"] == "decode"]
    assert {(p["sequences"], p["plan"]) for p in decode} == {(2, "w4a16")}


def configure(folder: Path, policy: Path, **options: Any):
    additional = {"flexquant": {"policy": str(policy)}, "of another plugin": 1}
    arguments = EngineArgs(
        model=str(folder), max_model_len=256, enforce_eager=True, additional_config=additional, **options
    )
    return arguments.create_engine_config()


def test_the_workers_configuration_holds_the_table_beside_the_users_options(tiny_merged, tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text(BATCHES.format(description="mine", most=8))
    config = configure(tiny_merged() / "merged", policy)
    assert config.additional_config["flexquant"] == {"policy": str(policy)}
    assert config.additional_config["of another plugin"] == 1
    json.dumps(config.additional_config)  # as vLLM hashes it
    policy.unlink()
    served = ServedPolicy.from_vllm(config)
    assert (served.name, served.routes.lookup("decode", 8).name) == (str(policy), "w4a16")
    merged = MergedConfig.from_json(config.model_config.hf_config.quantization_config)
    sequences = config.scheduler_config.max_num_seqs
    clipped = clip_to_server(config, merged, served).routes
    assert served.routes.intervals("decode")[-1].max_tokens > sequences
    assert clipped.intervals("decode")[-1].max_tokens == sequences


def test_a_worker_serves_decode_passes_up_to_the_size_of_graphs_that_vllm_sets_last(tiny_merged, tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text(BATCHES.format(description="mine", most=300))
    config = configure(tiny_merged() / "merged", policy, max_num_seqs=300)
    merged = MergedConfig.from_json(config.model_config.hf_config.quantization_config)
    served = ServedPolicy.from_vllm(config)
    found = []
    for sizes in ([], [256, 304, 512]):
        config.compilation_config.cudagraph_capture_sizes = sizes
        rows = clip_to_server(config, merged, served).routes.intervals("decode")
        found.append([(row.max_tokens, row.plan.name) for row in rows])
    assert found == [[(300, "w4a16")], [(300, "w4a16"), (304, "w8a8")]]


def test_a_configuration_without_a_policy_is_refused_by_the_worker(tiny_merged, tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text(BATCHES.format(description="mine", most=8))
    config = configure(tiny_merged() / "merged", policy)
    config.additional_config = {"flexquant": {"policy": str(policy)}}
    with pytest.raises(FlexQuantError, match="create_engine_config"):
        ServedPolicy.from_vllm(config)
