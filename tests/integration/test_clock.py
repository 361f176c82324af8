# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The system's clock jumps under a live server, by more than a year: answers and times do not mind.

With Debian's libfaketime, which ``make test-full`` fetches, in front of the C library.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from openai import OpenAI

from examples.vllm_server import VLLMServer, default_environment
from flexquant.serving.frontend.metrics import FORWARD, SECONDS
from tests.integration.conftest import WORK
from tests.integration.live_server import metric

pytestmark = [pytest.mark.engine, pytest.mark.full]

DAY = 86_400
JUMPS = ("+0d", "-400d", "+400d", "-30d")
"""Jumps of the clock from the true time, one after the other."""
TOKENS = 200


class Asked(NamedTuple):
    jumps: list[float]
    """The jumps in days, as the server's own replies tell the time."""
    answers: list[list[int]]
    passes: float
    timed: float
    """Seconds that all passes took, as the server counted them."""
    elapsed: float
    """Seconds since the server's start, by the test's clock."""


def ask(client: OpenAI, clock: Path, jump: str) -> tuple[float, list[int]]:
    """Have the clock jump in the middle of an answer; return when the next one began, and the first one."""
    options: dict[str, Any] = {"extra_body": {"ignore_eos": True, "return_token_ids": True}, "temperature": 0}
    tokens: list[int] = []
    prompt = list(range(10, 30))
    for chunk in client.completions.create(
        model="tiny", prompt=prompt, max_tokens=TOKENS, stream=True, **options
    ):
        tokens += chunk.choices[0].token_ids or ()
        if len(tokens) == TOKENS // 2:
            clock.write_text(jump)
    after = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, **options)
    return (after.created - time.time()) / DAY, tokens


@pytest.fixture(scope="module")
def asked(tiny_merged, tmp_path_factory) -> Iterator[Asked]:
    (library,) = (WORK / "faketime").glob("usr/lib/*/faketime/libfaketimeMT.so.1")
    folder = tmp_path_factory.mktemp("clock")
    clock = folder / "clock"
    clock.write_text(JUMPS[0])
    environment = default_environment() | {
        "VLLM_PLUGINS": "flexquant",
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    arguments = ["--enforce-eager", "--max-model-len", "512", "--served-model-name", "tiny"]
    start = time.monotonic()
    server = VLLMServer(tiny_merged() / "merged", arguments, folder / "log", environment)
    try:
        server.wait_until_healthy()
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        found = [ask(client, clock, jump) for jump in JUMPS]
        counted = [metric(server.url, f"{name}_total") for name in (FORWARD, SECONDS)]
        yield Asked(
            [days for days, _ in found], [tokens for _, tokens in found], *counted, time.monotonic() - start
        )
    finally:
        server.stop()


def test_the_servers_clock_jumped(asked: Asked) -> None:
    assert asked.jumps == pytest.approx([int(jump[:-1]) for jump in JUMPS], abs=0.5)


def test_answers_are_those_without_a_jump(asked: Asked) -> None:
    assert {len(answer) for answer in asked.answers} == {TOKENS}
    assert all(answer == asked.answers[0] for answer in asked.answers)


def test_passes_take_the_time_that_passed(asked: Asked) -> None:
    assert asked.passes >= len(JUMPS) * TOKENS
    assert 0 < asked.timed < asked.elapsed
