# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A live server that is asked for completions, and for what it tells of them, while its policy changes."""

from __future__ import annotations

import json
import time
import urllib.error
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

from flexquant.errors import FlexQuantError
from flexquant.policy.rules import load_policy
from flexquant.serving.frontend.client import ADMIN_KEY, apply_policy
from flexquant.serving.worker.metrics import FOLDER
from tests.integration.otlp_collector import Collector, Span
from tests.policies import LAYERED_DECODE

KEY = "a key"
ADMIN = "an administrator's key"
LONG = 1900
"""Tokens of an answer that continues until its client goes away."""
TRACE = bytes(range(16))
"""The id of the trace that the callers have begun."""
BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
)


Metrics = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""The samples of one scrape, by name and labels."""


class Changed(NamedTuple):
    """What came of the policies that were posted, in order."""

    codes: dict[str, int]
    """HTTP status codes of the policies that have to be refused."""
    refused: str
    """What ``flexquant policy apply`` printed for one of them."""
    after_refusals: dict[str, Any]
    """The status after the refusals and a dry run."""
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
    metrics: list[Metrics]
    """One scrape of the metrics for each of several requests."""
    status: dict[str, Any]
    """What /flexquant says, with the key."""
    refused: list[int]
    """HTTP status codes without the key, and with others."""
    header: dict[str, Any]
    passes: list[dict[str, Any]]
    changed: Changed
    answered: list[tuple[int, Any]]
    """What /flexquant/requests says of a response to two prompts, of one with two answers, and of none."""
    all_passes: list[dict[str, Any]]
    spans: list[tuple[list[Span], list[Span]]]
    """For each prompt of these responses: vLLM's spans of the answers, and FlexQuant's."""


@contextmanager
def plugin_routes() -> Iterator[None]:
    """Give servers that start here the routes of FlexQuant's plugin, whatever they inherit.

    Another engine of the process that starts them has metrics of its own.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, "/nowhere")
        patch.setenv("VLLM_PLUGINS", "flexquant")
        patch.setenv(ADMIN_KEY, ADMIN)
        yield


def scrape(url: str) -> Metrics:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def get_status(url: str, authorization: str | None) -> tuple[int, Any]:
    return ask(f"{url}/flexquant", authorization)


def ask(url: str, authorization: str | None, body: bytes | None = None) -> tuple[int, Any]:
    headers = {"Authorization": authorization} if authorization is not None else {}
    request = urllib.request.Request(url, data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as e:
        return e.code, None


@contextmanager
def traced() -> Iterator[None]:
    """Have servers that start here export their spans over HTTP, and soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        yield


def ask_all(
    url: str, merged: Path, trace: Path, collector: Collector, policies: Path, scrapes: int
) -> Served:
    """Ask a server for completions and for its records, before and after its policy changes."""
    client = OpenAI(base_url=url, api_key=KEY)

    def complete(number: int) -> None:
        prompt = list(range(10, 20 + 9 * number))
        client.completions.create(
            model="tiny", prompt=prompt, max_tokens=4 + number, extra_body={"ignore_eos": True}
        )

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(complete, range(12)))
    root = url.removesuffix("/v1")
    metrics = [scrape(root) for _ in range(scrapes)]
    code, status = get_status(root, f"Bearer {KEY}")
    assert code == 200
    wrong = [None, "", "Bearer", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer \u00fc"]
    refused = [get_status(root, authorization)[0] for authorization in wrong]
    header, *passes = [json.loads(line) for line in trace.read_text().splitlines()]
    context = {"traceparent": f"00-{TRACE.hex()}-{'ab' * 8}-01"}
    two = client.completions.create(
        model="tiny",
        prompt=[[11] * 30, [12] * 40],
        max_tokens=6,
        extra_body={"ignore_eos": True},
        extra_headers=context,
    )
    again = client.completions.create(
        model="tiny",
        prompt=[13] * 20,
        max_tokens=6,
        n=2,
        extra_body={"ignore_eos": True},
        extra_headers=context,
    )
    names = (two.id, again.id, "cmpl-nobodys", "cmpl-")
    answered = [ask(f"{root}/flexquant/requests/{name}", f"Bearer {KEY}") for name in names]
    refused.append(ask(f"{root}/flexquant/requests/{two.id}", None)[0])
    spans = []
    for prompt, number in ((f"{two.id}-0", 1), (f"{two.id}-1", 1), (f"{again.id}-0", 2)):
        own = collector.wait_for(number, lambda span, prompt=prompt: prompt in span.attributes.values())
        parents = {span.own for span in own}
        spans.append((own, collector.wait_for(number, lambda span, ids=parents: span.parent in ids)))
    changed = change_policies(root, client, trace, policies, scrapes)
    every = [record for line in trace.read_text().splitlines() if "phase" in (record := json.loads(line))]
    return Served(metrics, status, refused, header, passes, changed, answered, every, spans)


def change_policies(root: str, client: OpenAI, trace: Path, folder: Path, scrapes: int) -> Changed:
    """Post policies to a server that takes ``phase``, good ones and bad ones."""
    own = (folder / "own.yaml").as_posix()
    Path(own).write_text(LAYERED_DECODE)
    post = f"{root}/flexquant/policy"
    good = b"{schema: flexquant.policy/v1, rules: [{use: w8a8}]}"
    codes = {
        "no key": ask(post, None, good)[0],
        "vLLM's key": ask(post, f"Bearer {KEY}", good)[0],
        "no policy": ask(post, f"Bearer {ADMIN}", b"")[0],
        "not YAML": ask(post, f"Bearer {ADMIN}", b"{rules: [")[0],
        "no rules": ask(post, f"Bearer {ADMIN}", b"{schema: flexquant.policy/v1, rules: []}")[0],
        "aliases": ask(post, f"Bearer {ADMIN}", BOMB.encode())[0],
        "large": ask(post, f"Bearer {ADMIN}", b"#" * (1 << 20) + good)[0],
        "bad name": ask(f"{post}?name=a%0Ab", f"Bearer {ADMIN}", good)[0],
        "not loaded": ask(post, f"Bearer {ADMIN}", good.replace(b"w8a8", b"fp8"))[0],
    }
    with pytest.raises(FlexQuantError) as refused:
        apply_policy(root, load_policy("fp8-phase-batch"))
    dry_run = apply_policy(f"{root}/v1", load_policy(own), dry_run=True)
    after_refusals = get_status(root, f"Bearer {KEY}")[1]
    before, tokens, enough = lines(trace), [0, 0, 0], Event()

    def complete(number: int) -> None:
        with client.completions.create(
            model="tiny",
            prompt=list(range(10, 30 + number)),
            max_tokens=LONG,
            extra_body={"ignore_eos": True, "return_token_ids": True},
            stream=True,
        ) as chunks:
            for chunk in chunks:
                tokens[number] += len(chunk.choices[0].token_ids or ())
                if enough.is_set():
                    break

    with ThreadPoolExecutor(3) as pool:
        under_way = [pool.submit(complete, number) for number in range(3)]
        try:
            wait(lambda: min(tokens) > 4, under_way)
            taken = apply_policy(root, load_policy(own))
            told = lines(trace)
            wait(lambda: lines(trace) > told + 100, under_way)
        finally:
            enough.set()
        for future in under_way:
            future.result()
    while any(value for (name, _), value in scrape(root).items() if name == "vllm:num_requests_running"):
        time.sleep(0.1)
    status = get_status(root, f"Bearer {KEY}")[1]
    metrics = [scrape(root) for _ in range(scrapes)]
    passes = [json.loads(line) for line in trace.read_text().splitlines()][before:]
    return Changed(codes, str(refused.value), after_refusals, dry_run, taken, tokens, status, metrics, passes)


def lines(trace: Path) -> int:
    return len(trace.read_text().splitlines())


def wait(reached: Callable[[], bool], under_way: list[Future[None]]) -> None:
    """Wait for what the answers ``under_way`` bring about, which go on until they are told to end."""
    while not reached():
        assert not any(future.done() for future in under_way)
        time.sleep(0.01)


def labelled(*labels: tuple[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset((("model_name", "tiny"), ("engine", "0"), *labels))
