# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Show the workers' counters on the ``/metrics`` of vLLM's API server.

Workers count in their own memory, and are asked for their counters when somebody reads ``/metrics``. They
answer between two steps of their engine. If they take long, ``/metrics`` shows what they told before.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from vllm.logger import init_logger

from flexquant.serving.config import RankMetrics
from flexquant.serving.frontend.access import Answers, answer_of, ask_workers, serves_merged

if TYPE_CHECKING:
    from flexquant.serving.vllm_api import AsyncLLM

logger = init_logger("vllm.flexquant.metrics")

FORWARD, TOKENS = "flexquant:forward", "flexquant:tokens"
PADDED_TOKENS, SECONDS = "flexquant:padded_tokens", "flexquant:forward_seconds"
SIZE = "flexquant:forward_size"
REPLAYS = "flexquant:graph_replays"
WEIGHT_BYTES = "flexquant:weight_bytes"
POLICY = "flexquant:policy_info"
COUNTERS = {
    FORWARD: "Forward passes of vLLM's scheduler.",
    TOKENS: "Tokens of these passes, those that the scheduler asked for.",
    PADDED_TOKENS: "Tokens of these passes with padding.",
    SECONDS: "Time of these passes, from the description of the batch to the logits.",
}
"""Name of a counter, without the ``_total`` that Prometheus appends -> its help text."""
ENGINE = ["model_name", "engine"]
"""vLLM's labels, which all metrics have."""
CELL = [*ENGINE, "plan", "phase"]

OF_SEVERAL_SERVERS = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client's variable, which vLLM sets to have the metrics of several API servers in files."""
WAIT = 5.0
"""Largest number of seconds for the workers' answer; Prometheus gives up after ten by default."""


class WorkerMetrics(Collector):
    """Collects the counters of the workers of all engines."""

    def __init__(self, engine: AsyncLLM) -> None:
        """Take ``engine``, vLLM's client, which need not serve a merged checkpoint."""
        self._engine = engine
        self._question: asyncio.Future[Answers] | None = None
        self._ranks: Answers = []

    async def ask(self) -> None:
        """Ask the workers for their counters; keep the earlier ones if they take longer than WAIT."""
        if not serves_merged(self._engine):
            return
        if self._question is None or self._question.done():
            question = ask_workers(self._engine, "flexquant_metrics", timeout=None)
            self._question = asyncio.ensure_future(question)
        try:
            self._ranks = await answer_of(self._question, WAIT)
        except TimeoutError:
            logger.debug("the workers have not told their counters within %s s", WAIT)
        except Exception as e:  # the engine's error, which other routes report, or its end
            logger.warning("the workers cannot tell their counters: %s", e)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that the workers told last."""
        model = str(self._engine.vllm_config.model_config.served_model_name)
        engines = [([model, told["engine"]], told) for told in self._ranks if told is not None]
        yield from pass_metrics(engines)
        yield from weights_and_policies(engines)


Engines = Sequence[tuple[list[str], RankMetrics]]
"""The values of vLLM's labels for each engine, and what its counting worker told."""


def pass_metrics(engines: Engines) -> Iterator[Metric]:
    """Yield the counters of passes, and the histogram of their sizes."""
    counters = {name: CounterMetricFamily(name, text, labels=CELL) for name, text in COUNTERS.items()}
    text = "Of these passes those that ran from CUDA graphs."
    replays = CounterMetricFamily(REPLAYS, text, labels=[*CELL, "mode"])
    text = "Sequences of these passes in decode, else tokens, both without padding."
    sizes = HistogramMetricFamily(SIZE, text, labels=CELL)
    for engine, told in engines:
        for cell, (buckets, size) in zip(told["counted"], told["sizes"], strict=True):
            labels = [*engine, cell["plan"], cell["phase"]]
            sizes.add_metric(labels, buckets, size)
            for name, counter in counters.items():
                counter.add_metric(labels, cell[name.removeprefix("flexquant:")])
            for key in cell:
                if key.startswith("graph_replays_"):
                    replays.add_metric([*labels, key.removeprefix("graph_replays_")], cell[key])
    yield from (*counters.values(), replays, sizes)


def weights_and_policies(engines: Engines) -> Iterator[Metric]:
    """Yield the bytes of weights, and which policy routes."""
    text = "Bytes of weights on a rank, as kernels keep them; 'shared' by several variants."
    weights = GaugeMetricFamily(WEIGHT_BYTES, text, labels=[*ENGINE, "variant", "layers"])
    text = "1 for the policy that routes, 0 for one that did before it."
    policies = GaugeMetricFamily(POLICY, text, labels=[*ENGINE, "policy", "digest"])
    for engine, told in engines:
        for variant, of_layers in told["weight_bytes_by_layers"].items():
            for layers, nbytes in of_layers.items():
                weights.add_metric([*engine, variant, layers], nbytes)
        for name, digest, routes in told["policies"]:
            policies.add_metric([*engine, name, digest], routes)
    yield from (weights, policies)


async def read_metrics(request: Request) -> Response:
    """Return vLLM's metrics, of all API servers, and those of the workers, in Prometheus' text format."""
    collector: WorkerMetrics = request.app.state.flexquant_metrics
    await collector.ask()
    registry = CollectorRegistry()
    if OF_SEVERAL_SERVERS in os.environ:
        MultiProcessCollector(registry)
    else:
        registry.register(REGISTRY)
    registry.register(collector)
    text = await asyncio.to_thread(generate_latest, registry)
    return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})


def add_metrics_route(app: FastAPI) -> None:
    """Add ``GET /metrics`` in front of vLLM's own, which shows nothing that is not in its own files."""
    app.add_api_route("/metrics", read_metrics, methods=["GET"], include_in_schema=False)
    app.router.routes.insert(0, app.router.routes.pop())
