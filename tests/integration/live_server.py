# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""One live server, shared by the tests that ask it for completions and for what it tells of them.

Every test leaves the policy ``phase`` behind. Whoever kills the server leaves the next one to start again.
"""

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from examples.vllm_server import VLLMServer
from flexquant.errors import FlexQuantError
from flexquant.policy.rules import load_policy
from flexquant.serving.frontend.client import ADMIN_KEY, apply_policy
from tests.policies import LAYERED_DECODE

LIVE = {
    *("test_composition", "test_disaggregated", "test_hostile_callers", "test_live_server"),
    *("test_pages", "test_server_faults"),
}
"""The test files that ask the live server."""
KEY = "a key"
ADMIN = "an administrator's key"
CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"
REQUESTS = 12
LONG = 1900
"""Tokens of an answer that continues until its client goes away."""
Metrics = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""The samples of one scrape, by name and labels."""


class Live:
    """A ``vllm serve`` with FlexQuant's routes, under the policy ``phase``; it starts when it is asked."""

    def __init__(self, merged: Path, folder: Path, *arguments: str) -> None:
        self.trace, self.log = folder / "trace.jsonl", folder / "log"
        self._merged = merged
        (template := folder / "chat.jinja").write_text(CHAT)
        self._arguments = flexquant_options(policy="phase", trace=str(self.trace))
        self._arguments += ["--enforce-eager", "--max-model-len", "2048", "--served-model-name", "tiny"]
        self._arguments += ["--api-key", KEY, *arguments]
        self._arguments += ["--chat-template", str(template), "--chat-template-content-format", "string"]
        self._server: VLLMServer | None = None

    def server(self) -> VLLMServer:
        """Return the server, which is started unless it runs."""
        if self._server is None or self._server.processes.exit_code() is not None:
            self.stop()
            with plugin_routes():
                self._server = VLLMServer(self._merged, self._arguments, self.log)
            self._server.wait_until_healthy()
        return self._server

    @property
    def url(self) -> str:
        """The server's URL, without ``/v1``."""
        return self.server().url

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, **options)

    def apply(self, policy: str, *, dry_run: bool = False) -> dict[str, Any]:
        with plugin_routes():
            return apply_policy(self.url, load_policy(policy), dry_run=dry_run)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()


@pytest.fixture(scope="session")
def live(tiny_merged: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    shared = Live(tiny_merged() / "merged", tmp_path_factory.mktemp("live"))
    yield shared
    shared.stop()


def records_of(trace: Path) -> list[dict[str, Any]]:
    """Return the lines of a trace: the passes, and what is served before the first pass of each policy."""
    return [json.loads(line) for line in trace.read_text().splitlines()]


def flexquant_options(**options: object) -> list[str]:
    """Return the arguments that give a server's FlexQuant these options."""
    return ["--additional-config", json.dumps({"flexquant": options})]


def complete(client: OpenAI, prompt: str | list[int], tokens: int, **options: Any) -> Any:
    """Ask a server of the model ``tiny`` for the likeliest answer of so many tokens."""
    asked: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    more = {"ignore_eos": True, "return_token_ids": True}
    return client.completions.create(**asked | options, extra_body=more)


@contextmanager
def plugin_routes() -> Iterator[None]:
    """Give servers that start here the routes of FlexQuant's plugin, and clients the administrator's key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "flexquant")
        patch.setenv(ADMIN_KEY, ADMIN)
        yield


def scrape(url: str) -> Metrics:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    samples = (sample for family in families for sample in family.samples)
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}


def metric(url: str, name: str) -> float:
    """Return the sum of a metric's samples."""
    found = [value for (sample, _), value in scrape(url).items() if sample == name]
    assert found, name
    return sum(found)


def get_status(url: str) -> dict[str, Any]:
    """Return the answer of ``GET /flexquant``."""
    request = urllib.request.Request(f"{url}/flexquant", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


class Changed(NamedTuple):
    """What came of the policies that were posted, in order."""

    refused: str
    """What ``flexquant policy apply`` printed for one that cannot be served."""
    after_refusals: dict[str, Any]
    """The status after that and a dry run."""
    dry_run: dict[str, Any]
    taken: dict[str, Any]
    """What the server said of a policy that it took while it answered."""
    answers: list[int]
    """Tokens of each answer under way that had come by then, when its client went away."""
    status: dict[str, Any]
    metrics: list[Metrics]
    passes: list[dict[str, Any]]
    """The lines of the trace, what they say of the policy included."""


class Served(NamedTuple):
    before: Metrics
    metrics: list[Metrics]
    """One scrape of the metrics after the requests for each of several requests of its own."""
    status: dict[str, Any]
    """What /flexquant says, with the key."""
    header: dict[str, Any]
    passes: list[dict[str, Any]]
    """All passes of the server until then."""
    changed: Changed


def ask_all(live: Live, policies: Path, scrapes: int) -> Served:
    """Ask a server for completions and for its records, before and after its policy changes."""
    client, before = live.client(), scrape(live.url)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: complete(client, list(range(10, 20 + 9 * n)), 4 + n), range(REQUESTS)))
    metrics = [scrape(live.url) for _ in range(scrapes)]
    status = get_status(live.url)
    header, *records = records_of(live.trace)
    changed = change_policies(live, client, policies, scrapes)
    live.apply("phase")
    passes = [record for record in records if "phase" in record]
    return Served(before, metrics, status, header, passes, changed)


def change_policies(live: Live, client: OpenAI, folder: Path, scrapes: int) -> Changed:
    """Post policies to a server that takes ``phase``, a good one and a bad one."""
    own = str(folder / "own.yaml")
    Path(own).write_text(LAYERED_DECODE)
    with pytest.raises(FlexQuantError) as refused:
        live.apply("fp8-phase-batch")
    dry_run = live.apply(own, dry_run=True)
    after_refusals = get_status(live.url)
    before, tokens, enough = len(records_of(live.trace)), [0, 0, 0], Event()

    def ask(number: int) -> None:
        with complete(client, list(range(10, 30 + number)), LONG, stream=True) as chunks:
            for chunk in chunks:
                tokens[number] += len(chunk.choices[0].token_ids or ())
                if enough.is_set():
                    break

    with ThreadPoolExecutor(3) as pool:
        under_way = [pool.submit(ask, number) for number in range(3)]
        try:
            wait(lambda: min(tokens) > 4, under_way)
            taken = live.apply(own)
            told = len(live.trace.read_bytes().splitlines())
            wait(lambda: len(live.trace.read_bytes().splitlines()) > told + 100, under_way)
        finally:
            enough.set()
        for future in under_way:
            future.result()
    while metric(live.url, "vllm:num_requests_running"):
        time.sleep(0.1)
    metrics = [scrape(live.url) for _ in range(scrapes)]
    passes = records_of(live.trace)[before:]
    return Changed(
        str(refused.value), after_refusals, dry_run, taken, tokens, get_status(live.url), metrics, passes
    )


def wait(reached: Callable[[], bool], under_way: list[Future[None]]) -> None:
    """Wait for what the answers ``under_way`` bring about, which go on until they are told to end."""
    while not reached():
        assert not any(future.done() for future in under_way)
        time.sleep(0.01)


def labelled(*labels: tuple[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset((("model_name", "tiny"), ("engine", "0"), *labels))
