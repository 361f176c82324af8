# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Sends FlexQuant's routes, over a socket, bytes that no friendly client sends, and reads the answers."""

from __future__ import annotations

import json
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

PATIENCE = 300.0
"""Seconds after which a server that does not answer counts as hung."""
POLICY = b'{"schema": "flexquant.policy/v1", "rules": [{"use": "w8a8"}]}'
ENDLESS = 1 << 26
"""Bytes that are sent to a server that keeps on reading."""


class Answer(NamedTuple):
    status: int
    body: Any
    """The decoded JSON; None if the answer is no JSON."""


class Caller:
    """Calls a server at ``url``, with a new connection each time."""

    def __init__(self, url: str, key: str, admin: str) -> None:
        self._address = (urllib.parse.urlsplit(url).hostname, urllib.parse.urlsplit(url).port)
        self.key, self.admin = f"Bearer {key}".encode(), f"Bearer {admin}".encode()

    def get(self, path: bytes, *headers: bytes, method: bytes = b"GET") -> Answer:
        with self._sent(method, path, headers) as connection:
            return self._answer(connection)

    def post(self, body: bytes, query: bytes = b"") -> Answer:
        """Post a policy, with the key."""
        headers = [b"Authorization: " + self.admin, b"Content-Length: %d" % len(body)]
        with self._sent(b"POST", b"/flexquant/policy" + query, headers) as connection:
            connection.sendall(body)
            return self._answer(connection)

    def post_endlessly(self, *headers: bytes) -> tuple[Answer, int]:
        """Post in chunks until the server answers or closes; return the answer and the bytes sent."""
        sent = 0
        headers = (*headers, b"Transfer-Encoding: chunked")
        with self._sent(b"POST", b"/flexquant/policy", headers) as connection:
            chunk = b"10000\r\n" + b"#" * 0x10000 + b"\r\n"
            with suppress(ConnectionError):
                while sent < ENDLESS:
                    connection.sendall(chunk)
                    sent += len(chunk)
            return self._answer(connection), sent

    @contextmanager
    def unfinished(self) -> Iterator[None]:
        """Announce a body, send a part of it, and leave the server waiting for the rest."""
        headers = [b"Authorization: " + self.admin, b"Content-Length: 100"]
        with self._sent(b"POST", b"/flexquant/policy", headers) as connection:
            connection.sendall(POLICY[:10])
            yield

    def answers_while_it_reads(self, body: bytes) -> int:
        """Post a body that is slow to read; return how often the server says meanwhile that it is healthy."""
        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(self.post, body)
            answered = 0
            while not slow.done():
                answered += self.get(b"/health").status == 200
            assert slow.result().status == 422
        return answered

    @contextmanager
    def _sent(self, method: bytes, path: bytes, headers: Any) -> Iterator[socket.socket]:
        lines = [method + b" " + path + b" HTTP/1.1", b"Host: x", b"Connection: close", *headers]
        with socket.create_connection(self._address, timeout=PATIENCE) as connection:
            connection.sendall(b"\r\n".join(lines) + b"\r\n\r\n")
            yield connection

    def _answer(self, connection: socket.socket) -> Answer:
        received = b""
        with suppress(ConnectionResetError):  # a server need not read a body that it has refused
            while part := connection.recv(1 << 16):
                received += part
        head, _, body = received.partition(b"\r\n\r\n")
        try:
            return Answer(int(head.split()[1]), json.loads(body))
        except ValueError:
            return Answer(int(head.split()[1]), None)
