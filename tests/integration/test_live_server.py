# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a live server tells of its passes, on vLLM's /metrics and at /flexquant, against their trace."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from flexquant.measuring.server import vllm_serve
from flexquant.serving.metrics import (
    FOLDER,
    FORWARD,
    PADDED_TOKENS,
    POLICY,
    REPLAYS,
    SECONDS,
    TOKENS,
    WEIGHT_BYTES,
)

pytestmark = pytest.mark.engine
KEY = "a key"


class Served(NamedTuple):
    metrics: list[dict[tuple[str, frozenset[tuple[str, str]]], float]]
    """Of several requests: by sample and labels."""
    status: dict[str, Any]
    """From /flexquant, with the key."""
    refused: list[int]
    """HTTP status codes without the key, and with others."""
    header: dict[str, Any]
    passes: list[dict[str, Any]]


@contextmanager
def plugin_routes() -> Iterator[None]:
    """Servers that start here have the routes of vLLM's plugins of this name.

    Whatever they inherit: another engine of the process that starts them has its own metrics.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, "/nowhere")
        patch.setenv("VLLM_PLUGINS", "flexquant")
        yield


def scrape(url: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def get_status(url: str, authorization: str | None) -> tuple[int, Any]:
    headers = {"Authorization": authorization} if authorization is not None else {}
    request = urllib.request.Request(f"{url}/flexquant", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as e:
        return e.code, None


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.full)], ids=["one server", "two servers"]
)
def served(request: pytest.FixtureRequest, tiny_merged: Any, tmp_path_factory: Any) -> Served:
    merged: Path = tiny_merged() / "merged"
    trace: Path = tmp_path_factory.mktemp("metrics") / "routes.jsonl"
    options = json.dumps({"flexquant": {"policy": "phase", "trace": str(trace)}})
    arguments = ["--additional-config", options, "--enforce-eager", "--max-model-len", "256"]
    arguments += ["--api-server-count", str(request.param), "--served-model-name", "tiny"]
    arguments += ["--api-key", KEY]
    with plugin_routes(), vllm_serve(merged, *arguments) as url:
        client = OpenAI(base_url=url, api_key=KEY)

        def complete(number: int) -> None:
            prompt = list(range(10, 20 + 9 * number))
            client.completions.create(
                model="tiny", prompt=prompt, max_tokens=4 + number, extra_body={"ignore_eos": True}
            )

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(complete, range(12)))
        root = url.removesuffix("/v1")
        metrics = [scrape(root) for _ in range(4 * request.param)]
        code, status = get_status(root, f"Bearer {KEY}")
        assert code == 200
        wrong = [None, "", "Bearer", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer \u00fc"]
        refused = [get_status(root, authorization)[0] for authorization in wrong]
        header, *passes = [json.loads(line) for line in trace.read_text().splitlines()]
    return Served(metrics, status, refused, header, passes)


def labelled(*labels: tuple[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset((("model_name", "tiny"), ("engine", "0"), *labels))


def test_passes_and_tokens_are_those_of_the_trace(served: Served) -> None:
    expected: Counter[tuple[str, frozenset[tuple[str, str]]]] = Counter()
    for p in served.passes:
        cell = labelled(("plan", p["plan"]), ("phase", p["phase"]))
        expected[f"{FORWARD}_total", cell] += 1
        expected[f"{TOKENS}_total", cell] += p["scheduled_tokens"]
        expected[f"{PADDED_TOKENS}_total", cell] += p["tokens"]
    assert {p["phase"] for p in served.passes} >= {"prefill", "decode"}
    counted = tuple(f"{metric}_total" for metric in (FORWARD, TOKENS, PADDED_TOKENS))
    for metrics in served.metrics:
        assert {key: value for key, value in metrics.items() if key[0] in counted} == expected
        assert not any(name == f"{REPLAYS}_total" for name, _ in metrics), "nothing is captured on a CPU"


def test_every_pass_was_timed(served: Served) -> None:
    cells = {labelled(("plan", p["plan"]), ("phase", p["phase"])) for p in served.passes}
    for metrics in served.metrics:
        seconds = {labels: value for (name, labels), value in metrics.items() if name == f"{SECONDS}_total"}
        assert seconds.keys() == cells
        assert all(0 < value < 600 for value in seconds.values())


def test_policy_and_weights_are_told(served: Served) -> None:
    for metrics in served.metrics:
        ((policy, value),) = [
            (dict(labels), value) for (name, labels), value in metrics.items() if name == POLICY
        ]
        assert (policy["policy"], value) == ("phase", 1)
        assert len(policy["digest"]) == 64
        for variant, size in served.header["weight_bytes"].items():
            assert metrics[WEIGHT_BYTES, labelled(("variant", variant))] == size


def test_vllms_own_metrics_are_there_once(served: Served) -> None:
    for metrics in served.metrics:
        prompts = [v for (name, _), v in metrics.items() if name == "vllm:request_success_total"]
        assert sum(prompts) == 12


def test_the_status_is_what_the_trace_says(served: Served) -> None:
    status, header = served.status, served.header
    assert status["policy"]["name"] == header["policy"] == "phase"
    assert status["plans"] == header["plans"]
    assert status["weight_bytes"] == header["weight_bytes"]
    assert status["kernels"].keys() == header["plans"].keys()
    assert all("Kernel" in kernel for (kernel,) in status["kernels"].values())
    routes = {phase: [row["plan"] for row in rows] for phase, rows in status["routes"].items()}
    assert routes == {"prefill": ["w8a8"], "decode": ["w4a16"], "mixed": ["w8a8"]}
    counted = {(cell["plan"], cell["phase"]): cell["forward"] for cell in status["counted"]}
    assert counted == Counter((p["plan"], p["phase"]) for p in served.passes)


def test_the_status_asks_for_vllms_key(served: Served) -> None:
    assert served.refused == [401] * 6
