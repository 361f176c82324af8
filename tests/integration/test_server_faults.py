# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A live server whose engine is killed, whose clients go away, and which many hold on to without asking."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from examples.vllm_server import VLLMServer
from tests import programs

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


class Faulty(NamedTuple):
    killed: Killed
    """What came of an earlier server on the same files, whose engine was killed."""
    server: VLLMServer


def until(reached: Callable[[], bool]) -> bool:
    """Wait; return whether the condition was reached."""
    deadline = time.monotonic() + PATIENCE
    while not (now := reached()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return now


def client(server: VLLMServer) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


def stream(server: VLLMServer, prompt: int, tokens: int) -> Iterator[int]:
    """Yield the ids of an answer's tokens, as they come."""
    with client(server).completions.create(
        model="tiny",
        prompt=list(range(prompt, prompt + 20)),
        max_tokens=tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    ) as chunks:
        for chunk in chunks:
            yield from chunk.choices[0].token_ids or ()


def metric(server: VLLMServer, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples that have these labels."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=PATIENCE) as reply:
        families = list(text_string_to_metric_families(reply.read().decode()))
    found = [s for family in families for s in family.samples if s.name == name]
    assert found, name
    return sum(s.value for s in found if labels.items() <= s.labels.items())


def engines(server: VLLMServer) -> list[int]:
    names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in programs.session(server.processes.pid)}
    return [pid for pid, name in names.items() if name.startswith("VLLM::Engine")]


def kill_the_engine(server: VLLMServer) -> Killed:
    under_way = stream(server, 10, LONG)
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


@pytest.fixture(scope="module")
def faulty(tiny_merged, tmp_path_factory) -> Iterator[Faulty]:
    """Yield the second of two servers, one after the other; the first one's engine was killed."""
    logs = tmp_path_factory.mktemp("logs")
    options = json.dumps({"flexquant": {"policy": "w4a16"}})
    arguments = ["--additional-config", options, "--enforce-eager", "--max-model-len", "2048"]
    arguments += ["--served-model-name", "tiny"]
    servers = []
    try:
        for log in ("first", "second"):
            servers.append(VLLMServer(tiny_merged() / "merged", arguments, logs / log))
            servers[-1].wait_until_healthy()
            if log == "first":
                killed = kill_the_engine(servers[-1])
        yield Faulty(killed, servers[-1])
    finally:
        for server in servers:
            server.stop()


def test_a_server_whose_engine_is_killed_ends_by_itself_and_leaves_nothing(faulty: Faulty) -> None:
    assert faulty.killed.exit_code is not None
    assert faulty.killed.left == []
    assert faulty.killed.client is not None


def test_the_service_file_has_it_started_again_whatever_its_status(faulty: Faulty) -> None:
    """The status is vLLM's to choose: 0 in 0.32, which systemd takes for an end in good order."""
    service = (programs.ROOT / "examples/deploy/flexquant.service").read_text()
    (restart,) = [line for line in service.splitlines() if line.startswith("Restart=")]
    assert restart in (
        ["Restart=always"] if faulty.killed.exit_code == 0 else ["Restart=always", "Restart=on-failure"]
    )


def test_the_next_start_on_the_same_files_serves(faulty: Faulty) -> None:
    assert len(list(stream(faulty.server, 10, 8))) == 8


def surprise(server: VLLMServer, prompt: int, answer: list[int]) -> float:
    """Return how much less likely an answer's least likely token is than the likeliest at its place, in nats.

    The model says so in one prefill of the whole text. Answers of other batches are not the same bit for bit.
    """
    first = list(range(prompt, prompt + 20))
    reply = client(server).completions.create(
        model="tiny", prompt=first + answer, max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    places = reply.choices[0].model_extra["prompt_logprobs"][len(first) :]
    told = [{int(token): entry["logprob"] for token, entry in place.items()} for place in places]
    return max(max(place.values()) - place[token] for place, token in zip(told, answer, strict=True))


def test_a_client_that_goes_away_ends_its_request_and_no_other(faulty: Faulty) -> None:
    server, tokens = faulty.server, "vllm:generation_tokens_total"
    prompts = (20, 50)
    before = metric(server, tokens)
    with ThreadPoolExecutor(len(prompts)) as pool:
        others = [pool.submit(lambda prompt=prompt: list(stream(server, prompt, LONG))) for prompt in prompts]
        leaving = stream(server, 80, LONG)
        assert len([next(leaving) for _ in range(5)]) == 5
        leaving.close()
        answers = [other.result() for other in others]
    assert until(lambda: metric(server, "vllm:num_requests_running") == 0)
    assert 2 * LONG < metric(server, tokens) - before < 3 * LONG
    assert [len(answer) for answer in answers] == [LONG, LONG]
    for prompt, answer, another in zip(prompts, answers, reversed(answers), strict=True):
        assert surprise(server, prompt, answer) < NOISE < surprise(server, prompt, another)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.fixture
def connections(faulty: Faulty) -> Iterator[int]:
    """Yield how many connections the test and the server may have, with the test's limit raised to that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    servers, _ = resource.prlimit(faulty.server.processes.pid, resource.RLIMIT_NOFILE)
    ours = MOST + SPARE if hard == resource.RLIM_INFINITY else min(hard, MOST + SPARE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, ours), hard))
    yield min(MOST, max(soft, ours) - SPARE, servers - SPARE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_who_hold_on_without_asking_keep_nobody_out(faulty: Faulty, connections: int) -> None:
    """Every other connection has sent nothing, the rest a request without its end."""
    server = faulty.server
    address = urlsplit(server.url)
    before = descriptors(server.processes.pid)
    opened: list[socket.socket] = []
    try:
        for number in range(connections):
            opened.append(socket.create_connection((address.hostname, address.port), timeout=PATIENCE))
            if number % 2:
                opened[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Len")
        assert until(lambda: descriptors(server.processes.pid) >= connections)
        assert len(list(stream(server, 10, 8))) == 8
        for half in opened[1::2]:
            half.sendall(b"g")
        assert len(list(stream(server, 10, 8))) == 8
    finally:
        for connection in opened:
            connection.close()
    assert connections > 100
    assert until(lambda: descriptors(server.processes.pid) <= before)
