# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The option ``verify`` refuses a checkpoint that is not what the merge wrote; without it, vLLM serves it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from vllm.engine.arg_utils import EngineArgs

from examples.vllm_server import ServerError, vllm_serve
from flexquant.errors import FlexQuantError
from flexquant.serving.registration import verify_if_asked
from tests.checkpoints import flip_a_byte
from tests.integration.conftest import generate

NORM = "shared.model.norm.weight"
SHARD = "model-00001-of-00003.safetensors"
VERIFY = {"flexquant": {"verify": True}}


def configure(folder: Path, additional: dict):
    arguments = EngineArgs(
        model=str(folder), max_model_len=256, enforce_eager=True, additional_config=additional
    )
    return arguments.create_engine_config()


@pytest.fixture
def merged(tiny_merged) -> Path:
    return tiny_merged() / "merged"


@pytest.fixture
def flipped(merged, tmp_path) -> Path:
    folder = shutil.copytree(merged, tmp_path / "flipped")
    assert flip_a_byte(folder, NORM) == SHARD
    return folder


def test_what_the_merge_wrote_is_accepted(merged):
    assert configure(merged, VERIFY).additional_config["flexquant"] == {"verify": True}


def test_a_flipped_byte_is_refused_with_its_shard(flipped):
    with pytest.raises(FlexQuantError) as refused:
        configure(flipped, VERIFY)
    message = str(refused.value)
    assert f"({NORM} in {SHARD}); fetch or merge the checkpoint again" in message and "\n" not in message


@pytest.mark.parametrize("options", [{}, {"verify": False}])
def test_who_does_not_ask_gets_it_served(flipped, options):
    configure(flipped, {"flexquant": options})


@pytest.mark.engine
def test_a_flipped_byte_that_nobody_looks_for_changes_the_answers(merged, flipped):
    (sound,) = generate(merged, ["phase"], ["a prompt"], max_model_len=256)
    (served,) = generate(flipped, ["phase"], ["a prompt"], max_model_len=256)
    assert served.answers != sound.answers


def test_another_tokenizer_is_refused(merged, tmp_path):
    folder = shutil.copytree(merged, tmp_path / "edited")
    with open(folder / "tokenizer_config.json", "a") as file:
        file.write("\n")
    with pytest.raises(FlexQuantError, match=r"tokenizer_config.json was changed after merging"):
        configure(folder, VERIFY)


def test_a_model_that_is_no_folder_is_refused(merged):
    config = configure(merged, VERIFY)
    config.model_config.model = "somebody/something"
    with pytest.raises(
        FlexQuantError, match="needs a folder on this machine, and somebody/something is none"
    ):
        verify_if_asked(config)


@pytest.mark.engine
def test_a_server_ends_before_it_starts_an_engine(flipped, tmp_path):
    log = tmp_path / "log"
    with (
        pytest.raises(ServerError, match=f"{NORM} in {SHARD}"),
        vllm_serve(flipped, "--additional-config", json.dumps(VERIFY), log=log),
    ):
        pass
    assert "EngineCore" not in log.read_text()


@pytest.mark.engine
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.full
def test_a_server_verifies_once(merged, tmp_path, servers, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")  # vLLM logs at this level what it has verified
    log = tmp_path / "log"
    arguments = ["--additional-config", json.dumps(VERIFY), "--api-server-count", str(servers)]
    with vllm_serve(merged, *arguments, "--enforce-eager", "--max-model-len", "256", log=log):
        pass
    written = log.read_text()
    assert "EngineCore" in written
    assert written.count("tensors equal to recorded hashes") == 1
