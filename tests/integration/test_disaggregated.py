# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Prefill and decode in two servers of one merged checkpoint, as the example does it, and its proxy."""

import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from examples.disaggregated.run import BLOCK, PROMPTS, TOKENS
from examples.vllm_server import ProcessGroup, free_port
from tests import programs
from tests.integration.conftest import engine
from tests.integration.live_server import KEY, Live

pytestmark = pytest.mark.engine

FOLDER = programs.ROOT / "examples" / "disaggregated"


@pytest.mark.parametrize(
    ("decode_policy", "variants"), [("w4a16", {"w4a16"}), ("phase-batch", {"w8a8", "w4a16"})]
)
@pytest.mark.full
def test_two_servers_give_the_tokens_of_one(decode_policy, variants, tiny_merged, tmp_path):
    merged, output = tiny_merged() / "merged", tmp_path / "found.json"
    options = ["--decode-policy", decode_policy, "--output", output]
    command = [sys.executable, FOLDER / "run.py", merged, *options]
    printed = programs.run(command, timeout=600, environment=programs.newcomers_environment()).stdout
    found = json.loads(output.read_text())
    assert f"{len(PROMPTS)} of {len(PROMPTS)} answers have the same tokens" in printed
    assert found["equal_answers"] == len(found["prompt_tokens"]) == len(PROMPTS)
    assert found["tokens_of_answers"] == [TOKENS] * len(PROMPTS)
    assert len(set(found["texts"])) == len(PROMPTS)
    assert found["prompt_tokens_fetched"] == 2 * BLOCK * len(PROMPTS)
    held = {server: set(weights) - {"shared"} for server, weights in found["weights_mib"].items()}
    assert held == {"prefill": {"w8a8"}, "decode": variants, "one server": {"w8a8", "w4a16"}}
    alone = found["weights_mib"]["one server"]
    for server, needed in (("prefill", {"w8a8"}), ("decode", variants)):
        expected = sum(alone[name] for name in needed | {"shared"})
        assert sum(found["weights_mib"][server].values()) == pytest.approx(expected, abs=0.11), server


@contextmanager
def proxy(prefill: str, decode: str, log: Path) -> Iterator[OpenAI]:
    """Yield a client of a proxy. In tests one server takes both parts: the proxy treats its answers alike."""
    address = "127.0.0.1", free_port()
    command = [sys.executable, str(FOLDER / "proxy.py"), "--port", str(address[1])]
    running = ProcessGroup([*command, "--prefill", prefill, "--decode", decode], log, {})
    try:
        while running.exit_code() is None:
            with suppress(OSError), socket.create_connection(address):
                break
            time.sleep(0.1)
        yield OpenAI(base_url=f"http://127.0.0.1:{address[1]}/v1", api_key=KEY, max_retries=0, timeout=60)
    finally:
        running.stop()


def test_a_stream_and_a_refusal_pass_through(live: Live, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": [7, 8, 9], "max_tokens": 12, "temperature": 0}
    with proxy(live.url, live.url, tmp_path / "log") as client:
        whole = client.completions.create(**asked, extra_body={"ignore_eos": True})
        stream = client.completions.create(**asked, extra_body={"ignore_eos": True}, stream=True)
        parts = [chunk.choices[0].text for chunk in stream]
        assert len(parts) > 1 and "".join(parts) == whole.choices[0].text
        assert whole.usage is not None and whole.usage.completion_tokens == 12
        with pytest.raises(openai.NotFoundError, match="no-such-model"):
            client.completions.create(**asked | {"model": "no-such-model"})
        with pytest.raises(openai.BadRequestError, match="JSON object"):
            client.post("/completions", body=[1], cast_to=object)
        assert [model.id for model in client.models.list()] == ["tiny"]


@pytest.mark.parametrize("gone", ["prefill", pytest.param("decode", marks=pytest.mark.full)])
def test_a_server_that_is_gone_is_named(gone: str, live: Live, tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    urls = {"prefill": live.url, "decode": live.url} | {gone: nobody}
    refused = pytest.raises(openai.InternalServerError, match=nobody)
    with proxy(urls["prefill"], urls["decode"], tmp_path / "log") as client, refused:
        client.completions.create(model="tiny", prompt=[7, 8, 9], max_tokens=2)


def test_a_connector_that_vllm_does_not_have_is_named(tiny_merged: Callable[..., Path]) -> None:
    transfer = {"kv_connector": "NoSuchConnector", "kv_role": "kv_both"}
    refused = pytest.raises(ValueError, match="NoSuchConnector")
    with refused, engine(tiny_merged() / "merged", "w8a8", kv_transfer_config=transfer):
        pytest.fail("it was started")
