# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What two pages of a server's counters, written by hand, say of the traffic between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from flexquant.errors import FlexQuantError
from flexquant.tuning.traffic import Cell, watch

Serve = Callable[[Sequence[str]], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Give a function that answers ``/metrics`` with one page after another, and returns the server's URL."""
    servers = []

    def start(pages: Sequence[str]) -> str:
        left = iter(pages)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path == "/metrics" else 404)
                self.end_headers()
                self.wfile.write(next(left).encode())

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def page(*counters: tuple[int, int, float]) -> str:
    """Return one plan's decode counters of each engine: passes of 1 and of 2 sequences, and seconds."""
    size, seconds, bytes_, policy = (
        f"flexquant:{name}" for name in ("forward_size", "forward_seconds", "weight_bytes", "policy_info")
    )
    lines = [f"# TYPE {size} histogram"]
    for engine, (one, two, _) in enumerate(counters):
        for end, count in (("1", one), ("2", one + two), ("+Inf", one + two)):
            lines.append(f'{size}_bucket{{plan="p",phase="decode",engine="{engine}",le="{end}"}} {count}')
    lines.append(f"# TYPE {seconds} counter")
    for engine, (*_, took) in enumerate(counters):
        lines.append(f'{seconds}_total{{plan="p",phase="decode",engine="{engine}"}} {took}')
    lines += [f"# TYPE {bytes_} gauge", f'{bytes_}{{variant="w8a8",engine="0"}} 7']
    lines += [f"# TYPE {policy} gauge", f'{policy}{{policy="old"}} 0', f'{policy}{{policy="new"}} 1']
    return "\n".join([*lines, ""])


def test_the_traffic_since_the_start_is_that_of_all_engines(serve: Serve) -> None:
    traffic = watch(serve([page((60, 50, 1.5), (40, 0, 0.5))]), 0)
    assert traffic.cells == [Cell("p", "decode", 1, 100), Cell("p", "decode", 2, 50)]
    assert traffic.seconds == {("p", "decode"): 2.0}
    assert (traffic.policy, list(traffic.variants)) == ("new", ["w8a8"])


def test_a_variant_counts_as_loaded_with_all_layers(serve: Serve) -> None:
    """The page is of the last of two pipeline stages, which has the layers from 2 on."""
    told = {"w8a8": "2-3", "w4a16": "2-5", "fp8": "3-5", "shared": ""}
    weights = [
        f'flexquant:weight_bytes{{variant="{name}",layers="{layers}"}} 7' for name, layers in told.items()
    ]
    traffic = watch(serve(["\n".join([page((100, 0, 1.0)), *weights, ""])]), 0)
    assert list(traffic.variants) == ["w4a16"]


def test_what_was_served_before_the_watch_is_left_out(serve: Serve) -> None:
    pages = [page((1000, 500, 30.0), (0, 0, 0.0)), page((1060, 540, 31.5), (40, 0, 0.5))]
    traffic = watch(f"{serve(pages)}/v1", 0.01)
    assert traffic.cells == [Cell("p", "decode", 1, 100), Cell("p", "decode", 2, 40)]
    assert traffic.seconds == {("p", "decode"): 2.0}


def test_too_few_passes_tell_nothing(serve: Serve) -> None:
    with pytest.raises(FlexQuantError, match=r"has had 99 passes in 0\.01 s, too few"):
        watch(serve([page((1000, 0, 1.0)), page((1099, 0, 2.0))]), 0.01)
