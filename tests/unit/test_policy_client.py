# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The administrator's key reaches the server that was named, and nobody else reads it.

What the server answers is told in words.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from flexquant import cli
from flexquant.errors import FlexQuantError
from flexquant.policy.rules import load_policy
from flexquant.serving.frontend.client import ADMIN_KEY, apply_policy

KEY = "an administrator's key"


class Server(HTTPServer):
    """A server that answers as it is told, and keeps the keys that it was given."""

    def __init__(self, code: int, location: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.code, self.location = code, location
        self.answer: dict[str, object] = {}
        self.keys: list[str | None] = []
        self.path = ""
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.keys.append(self.headers["Authorization"])
        self.server.path = self.path
        self.send_response(self.server.code)
        if self.server.location:
            self.send_header("Location", self.server.location)
        answer = json.dumps(self.server.answer).encode()
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def other() -> Iterator[Server]:
    server = Server(200)
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_the_key_follows_no_redirect(code, other, monkeypatch):
    monkeypatch.setenv(ADMIN_KEY, KEY)
    named = Server(code, f"{other.url}/flexquant/policy")
    with named, pytest.raises(FlexQuantError, match=f"sends on to '{other.url}/flexquant/policy' .{code}.*"):
        try:
            apply_policy(named.url, load_policy("w8a8"))
        finally:
            named.shutdown()
    assert (named.keys, other.keys) == ([f"Bearer {KEY}"], [])


@pytest.mark.parametrize("key", [KEY, f"{KEY}\n", f"\t {KEY} \r\n"])
def test_space_around_the_key_is_none_of_it(key, other, monkeypatch):
    monkeypatch.setenv(ADMIN_KEY, key)
    assert apply_policy(other.url, load_policy("w8a8")) == {}
    assert other.keys == [f"Bearer {key.strip()}"]


@pytest.mark.parametrize("key", ["a\nkey", "a\x7fkey", "a k\u00e9y", "a key\u2026"])
def test_a_key_that_is_not_printable_ascii_is_refused_and_not_shown(key, other, monkeypatch):
    monkeypatch.setenv(ADMIN_KEY, key)
    with pytest.raises(FlexQuantError) as refused:
        apply_policy(other.url, load_policy("w8a8"))
    assert str(refused.value) == (
        f"the key in {ADMIN_KEY} has characters that not every client can send; use printable ASCII alone"
    )
    assert other.keys == []


def test_nothing_but_space_is_no_key(other, monkeypatch):
    monkeypatch.setenv(ADMIN_KEY, " \n")
    with pytest.raises(FlexQuantError, match=f"the environment has no {ADMIN_KEY}"):
        apply_policy(other.url, load_policy("w8a8"))


@pytest.mark.parametrize(
    ("options", "first", "last"),
    [
        (
            ["--dry-run"],
            "w8a8 would replace phase",
            "CUDA graphs would be captured, requests waiting meanwhile",
        ),
        (
            [],
            "w8a8 has replaced phase",
            "took 2.0 s; a restart serves the policy that the server was started with",
        ),
    ],
)
def test_the_command_tells_which_plan_comes_after_which(options, first, last, other, monkeypatch, capsys):
    monkeypatch.setenv(ADMIN_KEY, KEY)
    change = {"phase": "decode", "min_tokens": 1, "max_tokens": 64, "before": "w4a16", "after": "w8a8"}
    other.answer = {
        "before": {"name": "phase"},
        "after": {"name": "w8a8"},
        "routes": [change],
        "captures_graphs": True,
        "seconds": 2.0,
    }
    assert cli.main(["policy", "apply", other.url, "w8a8", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1]) == (first, last)
    assert lines[1].split() == ["decode", "1", "to", "64", "tokens", "w4a16", "->", "w8a8"]
    other.answer |= {"routes": [], "captures_graphs": False}
    assert cli.main(["policy", "apply", f"{other.url}/v1/", "w8a8", *options]) == 0
    assert other.path == f"/flexquant/policy?name=w8a8&dry_run={'true' if options else 'false'}"
    told = capsys.readouterr().out
    assert told.splitlines()[1] == "every pass keeps its plan" and "CUDA graphs" not in told
