# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""llama.cpp and OpenVINO GenAI, if `.venv/peers` is there, say what the 16-bit weights say, and are timed."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.__main__ import main
from benchmarks.speed.peers import ENVIRONMENT, PeerServer, make_gguf
from benchmarks.speed.results import read_cells
from benchmarks.speed.servers import ServerOptions
from benchmarks.speed.shapes import Shape
from benchmarks.speed.subjects import PEERS, parse_subject

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not (ENVIRONMENT / ".done").is_file(), reason="`make .venv/peers/.done` makes them"),
]
PROMPT = "The capital of France is"
TOKENS = 12


@pytest.fixture(scope="module")
def continuation(real_model: Path) -> str:
    """Return the greedy continuation of the prompt by transformers, in fp32."""
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    model = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    answer = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)
    return tokenizer.decode(answer[0, ids.shape[1] :])


@pytest.mark.parametrize("peer", PEERS)
def test_peers_continue_a_text_as_the_16_bit_weights_do(peer, continuation, real_model, tmp_path):
    subject = parse_subject(f"{peer}:F16")
    shape = Shape.from_config(json.loads((real_model / "config.json").read_text()))
    options = ServerOptions(256, 2, eager=True, kv_cache_gib=1, memory_share=1, threads=1)
    file = make_gguf(real_model, subject, tmp_path)
    server = PeerServer(subject, real_model, file, shape, options, tmp_path / "log")
    try:
        assert server.wait_until_ready(300)["process_gib"] > 0.2
        ids = AutoTokenizer.from_pretrained(real_model)(PROMPT).input_ids
        asked = {"prompt": ids, "max_tokens": TOKENS, "temperature": 0, "stream": True}
        body = json.dumps(asked).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{server.url}/v1/completions", body)) as reply:
            lines = reply.read().decode().replace("data: ", "").split("\n\n")
    finally:
        server.stop()
    choices = [json.loads(line)["choices"] for line in lines if line.startswith("{")]
    assert "".join(found[0]["text"] for found in choices if found) == continuation


def test_peers_answer_the_same_requests_in_full(tmp_path: Path) -> None:
    subjects = [f"{peer}:{name}" for peer in PEERS for name in ("Q4_0", "Q8_0")]
    command = ["run", "--model", "tiny", "--parts", "serving", "--subjects", ",".join(subjects)]
    command += ["--serving", "3x40+8", "--rounds", "1", "--max-rounds", "1", "--kv-cache-gib", "1"]
    assert main([*command, "--output", str(tmp_path / "results"), "--work", str(tmp_path / "work")]) == 0
    cells = {
        c["parameters"]["subject"]: c for c in read_cells(tmp_path / "results") if c["part"] == "serving"
    }
    assert list(cells) == subjects
    for cell in cells.values():
        assert cell["result"]["total_input_tokens"] == 120
        assert cell["result"]["output_lens"] == [8, 8, 8]
        assert "-" in cell["parameters"]["peer"]
