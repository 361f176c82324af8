# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Two data-parallel engines behind one server: both are counted, found and told of another policy."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from openai import OpenAI

from examples.vllm_server import vllm_serve
from flexquant.errors import FlexQuantError
from flexquant.policy.rules import load_policy
from flexquant.serving.frontend.client import apply_policy
from flexquant.serving.frontend.metrics import FORWARD, POLICY, TOKENS
from tests.integration.conftest import records_of
from tests.integration.live_server import KEY, Metrics, complete, get_status, plugin_routes, scrape
from tests.integration.two_ranks import needs_two_cores

pytestmark = [*needs_two_cores, pytest.mark.full]
REQUESTS, TOKENS_EACH = 8, 5


class Served(NamedTuple):
    metrics: Metrics
    status: dict[str, Any]
    traces: list[list[dict[str, Any]]]
    """The passes of each engine."""
    policies: list[list[str]]
    """The policies that the trace of each engine names, in order."""
    after: Metrics
    """The metrics after the policy was changed."""


@pytest.fixture(scope="module")
def served(tiny_merged: Any, tmp_path_factory: Any) -> Iterator[Served]:
    merged: Path = tiny_merged() / "merged"
    trace: Path = tmp_path_factory.mktemp("data-parallel") / "trace.jsonl"
    files = [trace, trace.with_name(trace.name + ".dp1")]
    options = json.dumps({"flexquant": {"policy": "phase", "trace": str(trace)}})
    arguments = ["--additional-config", options, "--enforce-eager", "--max-model-len", "256"]
    arguments += ["--data-parallel-size", "2", "--served-model-name", "tiny", "--api-key", KEY]
    with plugin_routes(), vllm_serve(merged, *arguments) as url:
        root = url.removesuffix("/v1")
        client = OpenAI(base_url=url, api_key=KEY)

        with ThreadPoolExecutor(REQUESTS) as pool:
            list(pool.map(lambda n: complete(client, list(range(10, 20 + n)), TOKENS_EACH), range(REQUESTS)))
        metrics = scrape(root)
        status = get_status(root)
        passes = [[record for record in records_of(file) if "phase" in record] for file in files]
        apply_policy(root, load_policy("w4a16"))
        after = scrape(root)
    policies = [[record["policy"] for record in records_of(file) if "policy" in record] for file in files]
    yield Served(metrics, status, passes, policies, after)


def test_each_engine_counts_what_its_trace_tells(served: Served) -> None:
    assert all(served.traces), "both engines have computed something"
    for engine, passes in enumerate(served.traces):
        expected: Counter[tuple[str, str]] = Counter()
        tokens: Counter[tuple[str, str]] = Counter()
        for record in passes:
            expected[record["phase"], record["plan"]] += 1
            tokens[record["phase"], record["plan"]] += record["scheduled_tokens"]
        assert told(served.metrics, f"{FORWARD}_total", engine) == expected
        assert told(served.metrics, f"{TOKENS}_total", engine) == tokens
    computed = sum(10 + number + TOKENS_EACH - 1 for number in range(REQUESTS))
    assert sum(record["scheduled_tokens"] for passes in served.traces for record in passes) == computed


def told(metrics: Metrics, name: str, engine: int) -> dict[tuple[str, str], float]:
    found = {}
    for (sample, labels), value in metrics.items():
        named = dict(labels)
        if sample == name and named["engine"] == str(engine):
            found[named["phase"], named["plan"]] = value
    return found


def test_the_status_is_the_sum_over_both(served: Served) -> None:
    counted = {(cell["phase"], cell["plan"]): cell["tokens"] for cell in served.status["counted"]}
    both = [Counter(told(served.metrics, f"{TOKENS}_total", engine)) for engine in range(2)]
    assert counted == both[0] + both[1] and served.status["ranks"] == 2


def test_both_take_another_policy(served: Served) -> None:
    assert served.policies == [["phase", "w4a16"]] * 2
    serving = [dict(labels) for (name, labels), value in served.after.items() if name == POLICY and value]
    assert sorted((found["engine"], found["policy"]) for found in serving) == [("0", "w4a16"), ("1", "w4a16")]


def test_engines_agree_however_many_post_at_once(tiny_merged: Any) -> None:
    """The posts go to two API servers, each of which tells both engines."""
    arguments = ["--enforce-eager", "--max-model-len", "256", "--api-key", KEY, "--api-server-count", "2"]
    arguments += ["--data-parallel-size", "2", "--additional-config", '{"flexquant": {"policy": "phase"}}']
    outcomes: list[str | None] = []
    with plugin_routes(), vllm_serve(tiny_merged() / "merged", *arguments) as url:
        root = url.removesuffix("/v1")

        def post(name: str) -> str | None:
            try:
                return apply_policy(root, load_policy(name))["after"]["name"]
            except FlexQuantError as e:
                assert "has been taken while" in str(e)
                return None

        with ThreadPoolExecutor(4) as pool:
            for _ in range(10):
                outcomes += pool.map(post, ["w8a8", "w4a16", "phase-batch", "phase"])
                status = get_status(root)
                assert "disagreement" not in status and status["ranks"] == 2
                assert status["policy"]["name"] in [*outcomes, "phase"]
    assert len({*outcomes} - {None}) > 1
