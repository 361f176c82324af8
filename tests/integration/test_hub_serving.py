# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""`vllm serve org/merged` fetches a merged checkpoint as any model; a local server stands for the Hub."""

from __future__ import annotations

import json

import pytest
from openai import OpenAI

from examples.vllm_server import VLLMServer, default_environment
from tests.hub import Hub, serving
from tests.integration.conftest import generate, records_of
from tests.integration.live_server import complete

pytestmark = pytest.mark.engine

SAMPLING = {"max_tokens": 8, "ignore_eos": True}


@pytest.mark.full
def test_a_merged_checkpoint_is_served_by_its_id(tiny_merged, tmp_path):
    prompt, trace, merged = [5, 6, 7, 8], tmp_path / "trace.jsonl", tiny_merged() / "merged"
    hub = Hub({"org/merged": merged})
    environment = {**default_environment(), "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
    config = json.dumps({"flexquant": {"policy": "phase", "trace": str(trace)}})
    options = ["--additional-config", config, "--max-model-len", "64", "--enforce-eager"]
    with serving(hub):
        environment["HF_ENDPOINT"] = hub.url
        server = VLLMServer("org/merged", options, tmp_path / "log", environment)
        try:
            server.wait_until_healthy()
            client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
            answer = complete(client, prompt, 8, model="org/merged", logprobs=0)
        finally:
            server.stop()
    passes = records_of(trace)[1:]
    assert [(p["phase"], p["plan"]) for p in passes] == [("prefill", "w8a8")] + [("decode", "w4a16")] * 7
    fetched = [name for method, name, _ in hub.requests if method == "GET" and name.endswith(".safetensors")]
    assert sorted(fetched) == sorted(f"org/merged/{file.name}" for file in merged.glob("*.safetensors"))

    asked = [{"prompt_token_ids": prompt}]
    (alone,) = generate(merged, ["phase"], asked, sampling=SAMPLING, max_model_len=64)
    (((tokens, likely),),) = alone.answers
    expected = [step[token] for token, step in zip(tokens, likely, strict=True)]
    assert answer.choices[0].logprobs.token_logprobs == pytest.approx(expected, abs=1e-3)
