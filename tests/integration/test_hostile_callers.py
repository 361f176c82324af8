# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Hostile callers, by hand and by Schemathesis, cannot break a server's routes or keep others waiting."""

import json
import re
import shutil
import socket
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import programs
from tests.integration.live_server import ADMIN, KEY, Live

pytestmark = pytest.mark.engine

PATIENCE = 300.0
"""Seconds after which a server that does not answer counts as hung."""
GOOD = b'{"schema": "flexquant.policy/v1", "rules": [{"use": "w8a8"}]}'
ENDLESS = 1 << 26
"""Bytes that are sent to a server that keeps on reading."""


class Answer(NamedTuple):
    status: int
    body: Any
    """The decoded JSON; None if the answer is no JSON."""


class Caller:
    """Sends a server at ``url`` bytes that no friendly client sends, over a new socket each time."""

    key, admin = f"Bearer {KEY}".encode(), f"Bearer {ADMIN}".encode()

    def __init__(self, url: str) -> None:
        self._address = (urllib.parse.urlsplit(url).hostname, urllib.parse.urlsplit(url).port)

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
        sent, headers = 0, (*headers, b"Transfer-Encoding: chunked")
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
            connection.sendall(GOOD[:10])
            yield

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
        is_json = b"application/json" in head
        return Answer(int(head.split()[1]), json.loads(body) if is_json and body else None)


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
BOMB += "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12))
WRONG = (b"", b"Bearer", b"Bearer ", b"Basic a key", b"Bearer a", b"Bearer a key, Bearer a key", b"a key")
WRONG += (b"Bearer a\0key", b"Bearer \xff\xfe", b"Bearer " + b"k" * 50000, b"Bearer an administrator")
GUARDED = ((b"GET", b"/flexquant"), (b"POST", b"/flexquant/policy"))

RULES = '{{"schema": "flexquant.policy/v1", "rules": [{{"use": "w8a8"}}], {}}}'
HUGE = b"9" * 300
NO_POLICIES = {
    "nothing": b"",
    "not closed": b'{"schema": ',
    "a list": b"[1, 2]",
    "two documents": GOOD + b"\n---\n" + GOOD,
    "a NUL": GOOD + b"\0",
    "half UTF-8": b"\xc3" + GOOD,
    "half UTF-16": b"\xff\xfe" + GOOD,
    "half a character": RULES.format('"description": "\\ud83d"').encode(),
    "a huge number": GOOD.replace(b"[", b'[{"when": {"tokens": {"max": %s}}, "use": "w8a8"}, ' % HUGE),
    "a number of 60 000 digits": b"9" * 60_000,
    "aliases of aliases": BOMB.encode(),
    "an alias of itself": b"&a [*a]",
    "a hundred thousand brackets": b"[" * 100_000,
    "as many dashes": b"- " * 60_000,
    "closed brackets": b"[" * 3000 + b"]" * 3000,
    "a Python object": b'!!python/object/apply:os.system ["true"]',
    "a day that is none": RULES.format('"derive": 2001-99-99').encode(),
    "a mapping as a key": b"{{a: 1}: 2}",
    "no rules": b"{schema: flexquant.policy/v1, rules: []}",
    "too many rules": b'{"schema": "flexquant.policy/v1", "rules": [' + b'{"use": "w8a8"},' * 100 + b"]}",
}


@pytest.fixture
def caller(live: Live) -> Iterator[Caller]:
    """Yield a caller; whatever it does, the server then serves the same policy, and has failed at nothing."""
    caller = Caller(live.url)
    yield caller
    status = caller.get(b"/flexquant", b"Authorization: " + caller.key)
    assert (status.status, status.body["policy"]["name"]) == (200, "phase")
    assert re.findall(r'HTTP/1.1" 5\d\d', live.log.read_text()) == []


def test_who_has_no_key_gets_nothing(caller: Caller) -> None:
    for method, path in GUARDED:
        others = {b"GET": caller.admin, b"POST": caller.key}[method]
        assert caller.get(path, method=method).status == 401
        for wrong in (*WRONG, others):
            header = b"Authorization: " + wrong
            assert caller.get(path, header, method=method).status == (400 if b"\0" in wrong else 401), header
    first = [b"Authorization: Bearer a", b"Authorization: " + caller.key]
    assert caller.get(b"/flexquant", *first).status == 401


@pytest.mark.parametrize("what", NO_POLICIES)
def test_what_is_no_policy_is_refused_with_a_reason(caller: Caller, what: str) -> None:
    answer = caller.post(NO_POLICIES[what])
    assert answer.status == 422 and answer.body["error"]["message"].startswith("posted policy")


def test_a_query_that_is_wrong_is_refused(caller: Caller) -> None:
    queries = {b"?name=": 400, b"?name=" + b"a" * 201: 400, b"?name=%00": 422, b"?name=%e2%80%ae": 422}
    queries |= {b"?dry_run=perhaps": 400, b"?dry_run=": 400, b"?dry_run=true&dry_run=perhaps": 400}
    assert {query: caller.post(GOOD, query).status for query in queries} == queries


def test_a_body_without_an_end_is_read_up_to_a_limit_and_from_an_administrator_alone(caller: Caller) -> None:
    for headers, status in (((b"Authorization: " + caller.admin,), 413), ((), 401)):
        answer, sent = caller.post_endlessly(*headers)
        assert answer.status == status and sent < ENDLESS
    assert caller.post(b"#" * (1 << 17) + GOOD).status == 413
    assert caller.post(b"#" * 100_000 + b"\n" + GOOD, b"?dry_run=true").status == 200


def test_nobody_waits_for_a_body_that_does_not_come(caller: Caller) -> None:
    with caller.unfinished():
        assert caller.get(b"/flexquant", b"Authorization: " + caller.key).status == 200
        assert caller.post(GOOD, b"?dry_run=true").status == 200


def test_nobody_waits_for_a_body_that_is_slow_to_read(caller: Caller) -> None:
    with ThreadPoolExecutor(1) as pool:
        slow, answered = pool.submit(caller.post, b"[" * 3000 + b"]" * 3000), 0
        while not slow.done():
            answered += caller.get(b"/health").status == 200
        assert slow.result().status == 422
    assert answered > 5


def test_other_methods_and_paths_are_not_there(caller: Caller) -> None:
    key = b"Authorization: " + caller.key
    for method, path in GUARDED:
        for other in {b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"TRACE", b"QUERY"} - {method}:
            assert caller.get(path, key, method=other).status == 405, (other, path)
    for path in (b"//flexquant", b"/flexquant/../flexquant", b"/FLEXQUANT", b"/flexquant/requests"):
        assert caller.get(path, key).status == 404


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("schemathesis"), reason="`make test-full` installs Schemathesis")
def test_schemathesis_finds_nothing_that_the_openapi_schema_does_not_say(live: Live, tmp_path: Path) -> None:
    """The schema says only in part what is refused (422)."""
    (tmp_path / "schemathesis.toml").write_text(
        f"""[auth.openapi]
"vLLM's key" = {{ bearer = "{KEY}" }}
"administrator's key" = {{ bearer = "{ADMIN}" }}
[checks.positive_data_acceptance]
expected-statuses = ["2xx", 404, 409, 422]
"""
    )
    command = ["schemathesis", "run", f"{live.url}/openapi.json", "--include-path-regex", "^/flexquant"]
    command += ["--checks", "all", "--max-examples", "200", "--seed", "1", "--request-timeout", "300"]
    try:
        done = programs.run([*command, "--continue-on-failure"], timeout=3000, folder=tmp_path)
    finally:
        live.apply("phase")
    assert "Tested: 3" in done.stdout and re.search(r"[1-9][\d,]{2,} generated", done.stdout)
