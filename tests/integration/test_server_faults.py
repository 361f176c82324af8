# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A live server whose engine is killed, whose clients go away, and which many hold on to without asking."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from examples.vllm_server import VLLMServer
from tests import programs
from tests.integration.live_server import Live, metric

pytestmark = [pytest.mark.engine, pytest.mark.full]

PATIENCE = 300
"""Seconds for what has to come about by itself, however busy the machine is."""
LONG = 1200
"""Tokens of an answer that takes seconds."""
NOISE = 1.0
"""Nats that the rounding of other batches may make."""
MOST = 10_000
SPARE = 300
"""Descriptors that are left to the test and to the server for everything else."""


class Killed(NamedTuple):
    exit_code: int | None
    left: list[int]
    """Processes of the server that were still there when it had ended."""
    client: Exception | None
    """What a client was told while its answer was under way."""


def until(reached: Callable[[], bool]) -> bool:
    """Wait; return whether the condition was reached."""
    deadline = time.monotonic() + PATIENCE
    while not (now := reached()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return now


def stream(live: Live, prompt: int, tokens: int) -> Iterator[int]:
    """Yield the ids of an answer's tokens, as they come."""
    with live.client(timeout=PATIENCE).completions.create(
        model="tiny",
        prompt=list(range(prompt, prompt + 20)),
        max_tokens=tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    ) as chunks:
        for chunk in chunks:
            yield from chunk.choices[0].token_ids or ()


def engines(server: VLLMServer) -> list[int]:
    names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in programs.session(server.processes.pid)}
    return [pid for pid, name in names.items() if name.startswith("VLLM::Engine")]


@pytest.fixture(scope="module")
def served(live: Live) -> Iterator[Live]:
    """Yield the server under a policy with one plan, so that a prefill scores a decode's tokens alike."""
    live.server()
    live.apply("w4a16")
    yield live
    live.server()
    live.apply("phase")


def surprise(live: Live, prompt: int, answer: list[int]) -> float:
    """Return how much less likely an answer's least likely token is than the likeliest at its place, in nats.

    The model says so in one prefill of the whole text. Answers of other batches are not the same bit for bit.
    """
    first = list(range(prompt, prompt + 20))
    reply = live.client(timeout=PATIENCE).completions.create(
        model="tiny", prompt=first + answer, max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    places = reply.choices[0].model_extra["prompt_logprobs"][len(first) :]
    told = [{int(token): entry["logprob"] for token, entry in place.items()} for place in places]
    return max(max(place.values()) - place[token] for place, token in zip(told, answer, strict=True))


def test_a_client_that_goes_away_ends_its_request_and_no_other(served: Live) -> None:
    tokens = "vllm:generation_tokens_total"
    prompts = (20, 50)
    before = metric(served.url, tokens)
    with ThreadPoolExecutor(len(prompts)) as pool:
        others = [pool.submit(lambda prompt=prompt: list(stream(served, prompt, LONG))) for prompt in prompts]
        leaving = stream(served, 80, LONG)
        assert len([next(leaving) for _ in range(5)]) == 5
        leaving.close()
        answers = [other.result() for other in others]
    assert until(lambda: metric(served.url, "vllm:num_requests_running") == 0)
    assert 2 * LONG < metric(served.url, tokens) - before < 3 * LONG
    assert [len(answer) for answer in answers] == [LONG, LONG]
    for prompt, answer, another in zip(prompts, answers, reversed(answers), strict=True):
        assert surprise(served, prompt, answer) < NOISE < surprise(served, prompt, another)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.fixture
def connections(served: Live) -> Iterator[int]:
    """Yield how many connections the test and the server may have, with the test's limit raised to that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    servers, _ = resource.prlimit(served.server().processes.pid, resource.RLIMIT_NOFILE)
    ours = MOST + SPARE if hard == resource.RLIM_INFINITY else min(hard, MOST + SPARE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, ours), hard))
    yield min(MOST, max(soft, ours) - SPARE, servers - SPARE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_who_hold_on_without_asking_keep_nobody_out(served: Live, connections: int) -> None:
    """Every other connection has sent nothing, the rest a request without its end."""
    server = served.server()
    address = urlsplit(server.url)
    before = descriptors(server.processes.pid)
    opened: list[socket.socket] = []
    try:
        for number in range(connections):
            opened.append(socket.create_connection((address.hostname, address.port), timeout=PATIENCE))
            if number % 2:
                opened[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Len")
        assert until(lambda: descriptors(server.processes.pid) >= connections)
        assert len(list(stream(served, 10, 8))) == 8
        for half in opened[1::2]:
            half.sendall(b"g")
        assert len(list(stream(served, 10, 8))) == 8
    finally:
        for connection in opened:
            connection.close()
    assert connections > 100
    assert until(lambda: descriptors(server.processes.pid) <= before)


def kill_the_engine(live: Live) -> Killed:
    server, under_way = live.server(), stream(live, 10, LONG)
    next(under_way)
    (engine,) = engines(server)
    os.kill(engine, signal.SIGKILL)
    told = None
    try:
        list(under_way)
    except Exception as e:
        told = e
    until(lambda: server.processes.exit_code() is not None)
    until(lambda: not programs.session(server.processes.pid))
    return Killed(server.processes.exit_code(), programs.session(server.processes.pid), told)


def test_a_server_whose_engine_is_killed_ends_by_itself_and_the_next_one_serves(served: Live) -> None:
    """The next one starts on the same files; the test is the last, as it ends the server."""
    killed = kill_the_engine(served)
    assert killed.exit_code is not None
    assert killed.left == []
    assert killed.client is not None
    assert len(list(stream(served, 10, 8))) == 8
