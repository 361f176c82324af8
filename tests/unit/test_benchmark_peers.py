# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""llama.cpp and OpenVINO GenAI as subjects of the speed benchmarks: what needs neither of them installed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm.benchmarks.lib import endpoint_request_func

from benchmarks.speed import peers
from benchmarks.speed.bench_client import BACKEND, prompts_as_ids
from benchmarks.speed.comparing import pairs
from benchmarks.speed.models import open_model
from benchmarks.speed.peers import check_peer, make_gguf, peer_arguments
from benchmarks.speed.servers import ServerOptions
from benchmarks.speed.shapes import SHAPES
from benchmarks.speed.subjects import parse_subject
from benchmarks.speed.synthetic import write_checkpoint
from flexquant.errors import FlexQuantError
from tests.checkpoints import make_checkpoint

LLAMA_CPP, OPENVINO = parse_subject("llama.cpp:Q4_0"), parse_subject("openvino:Q8_0")
OPTIONS = ServerOptions(2009, 128, eager=False, kv_cache_gib=1, memory_share=1, threads=2)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the place of the peers' environment, which is not there yet."""
    monkeypatch.setattr(peers, "ENVIRONMENT", tmp_path / "peers")
    return tmp_path / "peers"


def test_peers_are_subjects_that_serve_the_16_bit_checkpoint(tmp_path):
    assert (LLAMA_CPP.peer, LLAMA_CPP.quantisation, LLAMA_CPP.checkpoint) == ("llama.cpp", "Q4_0", "bf16")
    assert OPENVINO.describe() == {"subject": "openvino:Q8_0"}
    model = open_model(["tiny"], tmp_path)
    assert model.folder(LLAMA_CPP) == model.folder(parse_subject("bf16"))
    names = ["flexquant:phase", "flexquant:w8a8", "w8a8", LLAMA_CPP.name]
    assert pairs(names) == [("flexquant:phase", "w8a8"), ("flexquant:phase", "llama.cpp:Q4_0")]


@pytest.mark.parametrize("name", ["llama.cpp", "llama.cpp:Q3_K", "openvino:", "openvino:w8a8"])
def test_an_unknown_quantisation_is_named_with_the_allowed_ones(name):
    peer = name.partition(":")[0]
    with pytest.raises(FlexQuantError, match=f"'{name}' does not name a quantisation; .*{peer}:Q8_0"):
        parse_subject(name)


def test_a_peer_that_is_not_set_up_or_does_not_fit_is_refused(environment):
    missing = "'openvino:Q8_0' needs .*peers, .*run `make .venv/peers/.done`, or leave openvino:Q8_0 out"
    with pytest.raises(FlexQuantError, match=missing):
        check_peer(OPENVINO, on_gpu=False)
    packages = environment / "lib/python3.11/site-packages"
    (packages / "openvino_genai-2026.4.1.0.dist-info").mkdir(parents=True)
    with pytest.raises(FlexQuantError, match=missing):
        check_peer(OPENVINO, on_gpu=False)
    (environment / ".done").touch()
    assert check_peer(OPENVINO, on_gpu=False) == "openvino_genai-2026.4.1.0"
    with pytest.raises(FlexQuantError, match="on CPUs only, .*leave openvino:Q8_0 out"):
        check_peer(OPENVINO, on_gpu=True)


def test_peers_have_the_threads_and_the_kv_cache_of_vllms_worker():
    bytes_of_a_sequence = SHAPES["0.5b"].kv_bytes_per_token * 2048
    command = peer_arguments(LLAMA_CPP, Path("Q4_0.gguf"), OPTIONS, SHAPES["0.5b"], 80)
    told = dict(zip(command[4::2], command[5::2], strict=True))
    assert told["--model"] == "Q4_0.gguf" and told["--flash-attn"] == "on"
    assert told["--threads"] == "2" and told["--cpu-range"] == "0-1"
    assert int(told["--parallel"]) == 2**30 // bytes_of_a_sequence
    assert int(told["--ctx-size"]) == int(told["--parallel"]) * 2048
    command = peer_arguments(OPENVINO, Path("Q8_0.gguf"), OPTIONS, SHAPES["0.5b"], 80)
    told = dict(zip(command[2::2], command[3::2], strict=True))
    assert told["--threads"] == "2" and told["--cache-gib"] == "1" and told["--max-length"] == "2009"
    assert OPTIONS.environment(parse_subject("w8a8"))["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"


def test_a_model_that_cannot_be_converted_is_named_with_what_was_said(environment, tmp_path):
    (environment / "llama_cpp_python-0.3.36/vendor/llama.cpp").mkdir(parents=True)
    write_checkpoint(tmp_path / "model", SHAPES["tiny"], "bf16")
    said = r"does not make .*F16.gguf of this model: .*gguf.*; leave llama.cpp:Q4_0 out of --subjects"
    with pytest.raises(FlexQuantError, match=said):
        make_gguf(tmp_path / "model", LLAMA_CPP, tmp_path / "gguf")


def test_gguf_files_are_made_once_and_those_of_another_model_are_refused(tmp_path):
    for name in ("model", "other"):
        write_checkpoint(tmp_path / name, SHAPES["tiny"], "bf16")
    (tmp_path / "gguf").mkdir()
    for name in ("F16", "Q4_0"):
        (tmp_path / "gguf" / f"{name}.gguf").touch()
    assert make_gguf(tmp_path / "model", LLAMA_CPP, tmp_path / "gguf") == tmp_path / "gguf/Q4_0.gguf"
    with pytest.raises(FlexQuantError, match="GGUF files of another model than .*other is now; delete it"):
        make_gguf(tmp_path / "other", LLAMA_CPP, tmp_path / "gguf")


@dataclass
class Request:
    prompt: Any
    output_len: int


def test_prompts_go_out_as_the_models_token_ids(tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path / "model", scheme=None)
    asked = []

    async def ask(request: Request, session: None) -> Any:
        asked.append(request.prompt)
        return type("Answer", (), {"output_tokens": None})()

    monkeypatch.setitem(endpoint_request_func.ASYNC_REQUEST_FUNCS, BACKEND, ask)
    with prompts_as_ids(str(folder)):
        ask_with_ids: Any = endpoint_request_func.ASYNC_REQUEST_FUNCS[BACKEND]
        answer = asyncio.run(ask_with_ids(Request("a text", 7), None))
    assert answer.output_tokens == 7 and asked and all(isinstance(token, int) for token in asked[0])
    assert endpoint_request_func.ASYNC_REQUEST_FUNCS[BACKEND] is ask
