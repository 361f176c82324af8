# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A live server whose engine is killed, whose clients go away, and which many hold on to without asking.

And one whose clock jumps by more than a year, with Debian's libfaketime, which ``make test-full`` fetches;
and ``flexquant eval`` and ``tune`` where the disk is full when they write what they found.
"""

import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from openai import OpenAI

from examples.vllm_server import VLLMServer, default_environment
from flexquant.serving.frontend.metrics import FORWARD, SECONDS
from tests import programs
from tests.integration.conftest import WORK
from tests.integration.live_server import Live, complete, metric

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


def until(reached: Callable[[], bool]) -> bool:
    """Wait; return whether the condition was reached."""
    deadline = time.monotonic() + PATIENCE
    while not (now := reached()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return now


def stream(live: Live, prompt: int, tokens: int) -> Iterator[int]:
    """Yield the ids of an answer's tokens, as they come."""
    client = live.client(timeout=PATIENCE)
    with complete(client, list(range(prompt, prompt + 20)), tokens, stream=True) as chunks:
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
    tokens, prompts = "vllm:generation_tokens_total", (20, 50)
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
    server, opened = served.server(), []
    address = urlsplit(server.url).hostname, urlsplit(server.url).port
    before = descriptors(server.processes.pid)
    try:
        for number in range(connections):
            opened.append(socket.create_connection(address, timeout=PATIENCE))
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


def test_a_server_whose_engine_is_killed_ends_by_itself_and_the_next_one_serves(served: Live) -> None:
    """The next one starts on the same files; no test that asks this server comes afterwards."""
    server, under_way = served.server(), stream(served, 10, LONG)
    next(under_way)
    (engine,) = engines(server)
    os.kill(engine, signal.SIGKILL)
    with pytest.raises((openai.APIError, httpx.HTTPError)):
        list(under_way)
    assert until(lambda: server.processes.exit_code() is not None)
    assert until(lambda: not programs.session(server.processes.pid)), "processes of the server are left"
    assert len(list(stream(served, 10, 8))) == 8


DAY = 86_400
JUMPS = ("+0d", "-400d", "+400d", "-30d")
"""Jumps of the clock from the true time, one after the other."""
TOKENS = 200


def ask(client: OpenAI, clock: Path, jump: str) -> tuple[float, list[int]]:
    """Have the clock jump during an answer; return the jump in days, as the next tells, and the answer."""
    tokens, prompt = [], list(range(10, 30))
    for chunk in complete(client, prompt, TOKENS, stream=True):
        tokens += chunk.choices[0].token_ids or ()
        if len(tokens) == TOKENS // 2:
            clock.write_text(jump)
    return (complete(client, prompt, 1).created - time.time()) / DAY, tokens


def test_answers_and_times_do_not_mind_jumps_of_the_clock(tiny_merged, tmp_path) -> None:
    (library,) = (WORK / "faketime").glob("usr/lib/*/faketime/libfaketimeMT.so.1")
    (clock := tmp_path / "clock").write_text(JUMPS[0])
    environment = default_environment() | {"VLLM_PLUGINS": "flexquant", "LD_PRELOAD": str(library)}
    environment |= {"FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_NO_CACHE": "1"}
    environment |= {"FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    arguments = ["--enforce-eager", "--max-model-len", "512", "--served-model-name", "tiny"]
    start = time.monotonic()
    server = VLLMServer(tiny_merged() / "merged", arguments, tmp_path / "log", environment)
    try:
        server.wait_until_healthy()
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        jumps, answers = zip(*(ask(client, clock, jump) for jump in JUMPS), strict=True)
        passes, seconds = (metric(server.url, f"{name}_total") for name in (FORWARD, SECONDS))
        elapsed = time.monotonic() - start
    finally:
        server.stop()
    assert list(jumps) == pytest.approx([int(jump[:-1]) for jump in JUMPS], abs=0.5)
    assert len(answers[0]) == TOKENS and all(answer == answers[0] for answer in answers)
    assert passes >= len(JUMPS) * TOKENS and 0 < seconds < elapsed


EVAL = "eval --policies phase --batch-sizes 2 --samples 2 --prompt-tokens 16 --tokens 8"
TUNE = "tune --quick --rounds 1 --max-rounds 1 --max-batch 4 --max-tokens 64 --overwrite"


@pytest.mark.parametrize(
    ("command", "output", "written", "advice"),
    [
        (EVAL, "results", "results/quality.json", "the numbers are kept in"),
        (TUNE, "policy.yaml", "policy.yaml", "free some space"),
    ],
)
def test_on_a_full_disk_a_command_says_so_and_the_next_run_succeeds(
    command, output, written, advice, tiny_merged, tmp_path, tmp_path_factory
):
    """The file leads to ``/dev/full``, which takes no byte."""
    name, *options = command.split()
    if name == "eval":
        (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
        options += ["--text", str(tmp_path / "text.txt")]
    file = tmp_path / "output" / written
    file.parent.mkdir(parents=True)
    file.symlink_to("/dev/full")
    run = [sys.executable, "-m", "flexquant", name, str(tiny_merged(num_layers=2) / "merged"), *options]
    run += ["--output", str(tmp_path / "output" / output)]
    short = str(tmp_path_factory.mktemp("t"))  # an engine's socket has a name of at most 107 bytes
    environment = programs.newcomers_environment() | {"TMPDIR": short}
    refused = programs.run(run, timeout=600, status=1, environment=environment)
    sentence = next(line for line in refused.stderr.splitlines() if line.startswith("flexquant"))
    assert "No space left on device" in sentence and advice in sentence
    assert "Traceback" not in refused.stderr and file.is_symlink()
    file.unlink()
    programs.run(run, timeout=600, environment=environment)
    assert file.read_text()
