# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The Grafana dashboard: a real Prometheus that scrapes a live server answers the queries of every panel."""

from __future__ import annotations

import http
import json
import math
import os
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from examples.vllm_server import ProcessGroup, free_port
from tests import programs
from tests.integration.live_server import Live, complete

PROMETHEUS = shutil.which("prometheus")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.full,
    pytest.mark.skipif(PROMETHEUS is None, reason="`make test-full` fetches Prometheus"),
]
DASHBOARD = programs.ROOT / "examples" / "grafana" / "flexquant.json"
PATIENCE = 120
"""Seconds that data may take to arrive."""


@contextmanager
def prometheus(scraped: str, folder: Path) -> Iterator[str]:
    """Yield the URL of a Prometheus that asks ``scraped``, a host and port, every second."""
    (folder / "prometheus.yml").write_text(f"""
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: vllm
    static_configs: [{{targets: ["{scraped}"]}}]
""")
    address = f"127.0.0.1:{free_port()}"
    command = [str(PROMETHEUS), f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    processes = ProcessGroup(command, folder / "prometheus.log", os.environ)
    try:
        yield f"http://{address}"
    finally:
        processes.stop()


def ask(prometheus_url: str, expression: str) -> list[dict[str, Any]]:
    """Return the series that a query finds now, without those that have no number."""
    query = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"{prometheus_url}/api/v1/query?{query}", timeout=30) as reply:
            series = json.load(reply)["data"]["result"]
    except urllib.error.HTTPError as e:
        if e.code != http.HTTPStatus.SERVICE_UNAVAILABLE:
            pytest.fail(f"{expression}: {e.read().decode()}")
        return []  # Prometheus has not started yet
    except urllib.error.URLError:
        return []  # its port is not open yet
    return [found for found in series if not math.isnan(float(found["value"][1]))]


def queries() -> dict[str, list[str]]:
    """Return the queries of each panel, with Grafana's variables filled in."""
    dashboard = json.loads(DASHBOARD.read_text())
    filled = {"$model_name": ".*", "$__rate_interval": "10s"}
    found = {}
    for panel in dashboard["panels"]:
        found[panel["title"]] = [target["expr"] for target in panel["targets"]]
        for variable, value in filled.items():
            found[panel["title"]] = [query.replace(variable, value) for query in found[panel["title"]]]
        assert not any("$" in query for query in found[panel["title"]])
    return found


def test_every_query_of_every_panel_returns_data(live: Live, tmp_path: Path) -> None:
    missing = [(panel, query) for panel, asked in queries().items() for query in asked]
    assert len(missing) > 10
    with (
        prometheus(urllib.parse.urlsplit(live.url).netloc, tmp_path) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        deadline = time.monotonic() + PATIENCE
        while missing and time.monotonic() < deadline:
            answered = pool.submit(complete, live.client(), list(range(10, 30)), 8)
            missing = [(panel, query) for panel, query in missing if not ask(server, query)]
            answered.result()
    assert not missing
