# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Two data-parallel engines behind one server: both are counted, found and told of another policy.

And one model on two machines, as vLLM starts it: a command on each, which reads the files of its own machine.
Both machines are this one: two commands in two folders, which meet at the loopback interface.
"""

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai import OpenAI

from examples.vllm_server import ServerError, VLLMServer, default_environment, free_port
from flexquant.errors import FlexQuantError
from flexquant.policy.rules import load_policy
from flexquant.serving.frontend.client import apply_policy
from flexquant.serving.frontend.metrics import FORWARD, POLICY, TOKENS
from tests.integration.conftest import records_of
from tests.integration.live_server import Live, Metrics, flexquant_options, get_status, plugin_routes, scrape
from tests.integration.live_server import complete as ask
from tests.integration.two_ranks import CORES, needs_two_cores

pytestmark = [*needs_two_cores, pytest.mark.full]
REQUESTS, TOKENS_EACH = 8, 5


@contextmanager
def replicas(merged: Path, folder: Path, *arguments: str) -> Iterator[Live]:
    live = Live(merged, folder, "--data-parallel-size", "2", *arguments)
    try:
        yield live
    finally:
        live.stop()


def told(metrics: Metrics, name: str, engine: int) -> Counter[tuple[str, str]]:
    """Return an engine's counter by phase and plan."""
    named = [(dict(labels), int(n)) for (sample, labels), n in metrics.items() if sample == f"{name}_total"]
    return Counter({(of["phase"], of["plan"]): n for of, n in named if of["engine"] == str(engine)})


def test_both_engines_are_counted_found_and_told_of_another_policy(merged: Path, tmp_path: Path) -> None:
    with replicas(merged, tmp_path) as live:
        client, prompts = live.client(), [list(range(10, 20 + number)) for number in range(REQUESTS)]
        with ThreadPoolExecutor(REQUESTS) as pool:
            list(pool.map(lambda prompt: ask(client, prompt, TOKENS_EACH), prompts))
        metrics, status = scrape(live.url), get_status(live.url)
        live.apply("w4a16")
        after = scrape(live.url)
        traces = [records_of(file) for file in (live.trace, live.trace.with_name(f"{live.trace.name}.dp1"))]
    computed, summed = 0, Counter[tuple[str, str]]()
    for engine, records in enumerate(traces):
        assert (passes := [record for record in records if "phase" in record]), "each has computed something"
        tokens: Counter[tuple[str, str]] = Counter()
        for record in passes:
            tokens[record["phase"], record["plan"]] += record["scheduled_tokens"]
        assert told(metrics, FORWARD, engine) == Counter((p["phase"], p["plan"]) for p in passes)
        assert told(metrics, TOKENS, engine) == tokens
        computed, summed = computed + sum(tokens.values()), summed + tokens
        assert [record["policy"] for record in records if "policy" in record] == ["phase", "w4a16"]
    assert computed == sum(len(prompt) + TOKENS_EACH - 1 for prompt in prompts)
    assert {(cell["phase"], cell["plan"]): cell["tokens"] for cell in status["counted"]} == summed
    assert status["ranks"] == 2
    serving = [dict(labels) for (name, labels), value in after.items() if name == POLICY and value]
    assert sorted((found["engine"], found["policy"]) for found in serving) == [("0", "w4a16"), ("1", "w4a16")]


def test_engines_agree_however_many_post_at_once(merged: Path, tmp_path: Path) -> None:
    """The posts go to two API servers, each of which tells both engines."""
    outcomes: list[str | None] = []
    with replicas(merged, tmp_path, "--api-server-count", "2") as live, plugin_routes():
        url = live.url

        def post(name: str) -> str | None:
            try:
                return apply_policy(url, load_policy(name))["after"]["name"]
            except FlexQuantError as e:
                assert "was being checked" in str(e)
                return None

        with ThreadPoolExecutor(4) as pool:
            for _ in range(10):
                outcomes += pool.map(post, ["w8a8", "w4a16", "phase-batch", "phase"])
                status = get_status(url)
                assert "disagreement" not in status and status["ranks"] == 2
                assert status["policy"]["name"] in [*outcomes, "phase"]
    assert len({*outcomes} - {None}) > 1


START_SECONDS = 300


@contextmanager
def two_nodes(merged: Path, work: Path, policies: list[str]) -> Iterator[VLLMServer]:
    """Serve ``merged`` tensor parallel on two nodes, each with its policy; yield the first, as it starts."""
    meeting = ["--tensor-parallel-size", "2", "--nnodes", "2"]
    meeting += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    nodes: list[VLLMServer] = []
    try:
        for rank, policy in enumerate(policies):
            file = work / f"node{rank}.yaml"
            file.write_text(json.dumps(load_policy(policy).document))
            environment = default_environment() | {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
            environment |= {"VLLM_CPU_OMP_THREADS_BIND": str(CORES[rank])}
            arguments = [*meeting, "--node-rank", str(rank), "--enforce-eager", "--max-model-len", "256"]
            arguments += flexquant_options(policy=str(file)) + ["--headless"] * bool(rank)
            nodes.append(VLLMServer(merged, arguments, work / f"node{rank}.log", environment))
        yield nodes[0]
    finally:
        for node in nodes:
            node.stop()


def test_machines_with_unequal_policies_do_not_serve(tiny_merged, tmp_path):
    """If they served, the ranks of one pass would multiply with different variants."""
    merged = tiny_merged(num_layers=2) / "merged"
    with pytest.raises(ServerError), two_nodes(merged, tmp_path, ["phase", "w8a8"]) as server:
        server.wait_until_healthy(START_SECONDS)
    for rank in range(2):
        log = (tmp_path / f"node{rank}.log").read_text()
        assert "rank 1 has other routes than rank 0; give every machine the same policy file" in log


def test_machines_with_equal_policies_serve(tiny_merged, tmp_path):
    merged = tiny_merged(num_layers=2) / "merged"
    with two_nodes(merged, tmp_path, ["phase", "phase"]) as server:
        server.wait_until_healthy(START_SECONDS)
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        assert ask(client, "two machines", 4, model=str(merged)).usage.completion_tokens == 4
