# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A collector of OpenTelemetry's traces over HTTP, which decodes what a process exports to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

PATIENCE = 120
"""Seconds that spans may take to arrive."""


class Span(NamedTuple):
    name: str
    trace: bytes
    own: bytes
    """The span's own id."""
    parent: bytes
    start: int
    end: int
    attributes: dict[str, Any]


class Collector:
    """The spans that came to ``url``."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Span] = []

    def take(self, request: bytes) -> None:
        """Take an export request."""
        for resource in ExportTraceServiceRequest.FromString(request).resource_spans:
            for scope in resource.scope_spans:
                self.spans += [_decoded(span) for span in scope.spans]

    def wait_for(self, number: int, wanted: Callable[[Span], bool]) -> list[Span]:
        """Return the spans that are wanted, once there are ``number`` of them."""
        deadline = time.monotonic() + PATIENCE
        while len(found := [span for span in list(self.spans) if wanted(span)]) < number:
            assert time.monotonic() < deadline, f"{len(found)} spans instead of {number}, of {self.spans}"
            time.sleep(0.1)
        return found


@contextmanager
def otlp_collector() -> Iterator[Collector]:
    """Yield a collector that listens at 127.0.0.1."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def _decoded(span: Any) -> Span:
    attributes = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
    times = span.start_time_unix_nano, span.end_time_unix_nano
    return Span(span.name, span.trace_id, span.span_id, span.parent_span_id, *times, attributes)
