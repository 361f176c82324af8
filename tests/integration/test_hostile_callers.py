# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Hostile callers, by hand and by Schemathesis, cannot break FlexQuant's routes or keep others waiting.

A real server, with a key of vLLM's and one of the administrator's.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.vllm_server import vllm_serve
from tests import programs
from tests.integration.hostile_callers import ENDLESS, POLICY, Caller
from tests.integration.live_server import ADMIN, BOMB, KEY, plugin_routes

pytestmark = pytest.mark.engine

WRONG = (b"", b"Bearer", b"Bearer ", b"Basic a key", b"Bearer a", b"Bearer a key, Bearer a key")
WRONG += (
    b"Bearer a\0key",
    b"Bearer \xff\xfe",
    b"Bearer " + b"k" * 50000,
    b"a key",
    b"Bearer an administrator",
)
GUARDED = ((b"GET", b"/flexquant"), (b"GET", b"/flexquant/requests/cmpl-1"), (b"POST", b"/flexquant/policy"))

RULES = '{{"schema": "flexquant.policy/v1", "rules": [{{"use": "w8a8"}}], {}}}'
NO_POLICIES = {
    "nothing": b"",
    "not closed": b'{"schema": ',
    "a list": b"[1, 2]",
    "two documents": POLICY + b"\n---\n" + POLICY,
    "a NUL": POLICY + b"\0",
    "half UTF-8": b"\xc3" + POLICY,
    "half UTF-16": b"\xff\xfe" + POLICY,
    "half a character": RULES.format('"description": "\\ud83d"').encode(),
    "a huge number": POLICY.replace(
        b"[", b'[{"when": {"tokens": {"max": %s}}, "use": "w8a8"}, ' % (b"9" * 300)
    ),
    "a number of 60 000 digits": b"9" * 60_000,
    "aliases of aliases": BOMB.encode(),
    "an alias of itself": b"&a [*a]",
    "a hundred thousand brackets": b"[" * 100_000,
    "as many dashes": b"- " * 60_000,
    "closed brackets": b"[" * 3000 + b"]" * 3000,
    "a Python object": b'!!python/object/apply:os.system ["true"]',
    "a day that is none": RULES.format('"derive": 2001-99-99').encode(),
    "a mapping as a key": b"{{a: 1}: 2}",
    "too many rules": b'{"schema": "flexquant.policy/v1", "rules": [' + b'{"use": "w8a8"},' * 100 + b"]}",
}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile") / "log"


@pytest.fixture(scope="module")
def url(tiny_merged: Any, log: Path) -> Iterator[str]:
    options = json.dumps({"flexquant": {"policy": "phase", "requests": True}})
    arguments = ["--additional-config", options, "--enforce-eager", "--max-model-len", "256"]
    arguments += ["--api-key", KEY]
    with plugin_routes(), vllm_serve(tiny_merged() / "merged", *arguments, log=log) as url:
        yield url.removesuffix("/v1")


@pytest.fixture
def caller(url: str, log: Path) -> Iterator[Caller]:
    """Yield a caller; whatever it does, the server then serves the same policy, and has failed at nothing."""
    caller = Caller(url, KEY, ADMIN)
    yield caller
    status = caller.get(b"/flexquant", b"Authorization: " + caller.key)
    assert (status.status, status.body["policy"]["name"]) == (200, "phase")
    assert re.findall(r'HTTP/1.1" 5\d\d', log.read_text()) == []


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
    assert answer.status == 422
    assert answer.body["error"]["message"].startswith("posted policy")


def test_a_query_that_is_wrong_is_refused(caller: Caller) -> None:
    queries = {b"?name=": 400, b"?name=" + b"a" * 201: 400, b"?name=%00": 422, b"?name=%e2%80%ae": 422}
    queries |= {b"?dry_run=perhaps": 400, b"?dry_run=": 400, b"?dry_run=true&dry_run=perhaps": 400}
    assert {query: caller.post(POLICY, query).status for query in queries} == queries


def test_a_body_without_an_end_is_read_up_to_a_limit_and_from_an_administrator_alone(caller: Caller) -> None:
    for headers, status in (((b"Authorization: " + caller.admin,), 413), ((), 401)):
        answer, sent = caller.post_endlessly(*headers)
        assert answer.status == status
        assert sent < ENDLESS
    assert caller.post(b"#" * (1 << 17) + POLICY).status == 413
    assert caller.post(b"#" * 100_000 + b"\n" + POLICY, b"?dry_run=true").status == 200


def test_nobody_waits_for_a_body_that_does_not_come(caller: Caller) -> None:
    with caller.unfinished():
        assert caller.get(b"/flexquant", b"Authorization: " + caller.key).status == 200
        assert caller.post(POLICY, b"?dry_run=true").status == 200


def test_nobody_waits_for_a_body_that_is_slow_to_read(caller: Caller) -> None:
    assert caller.answers_while_it_reads(b"[" * 3000 + b"]" * 3000) > 5


def test_other_methods_and_paths_are_not_there(caller: Caller) -> None:
    key = b"Authorization: " + caller.key
    for method, path in GUARDED:
        for other in {b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"TRACE", b"QUERY"} - {method}:
            assert caller.get(path, key, method=other).status == 405, (other, path)
    for path in (b"//flexquant", b"/flexquant/../flexquant", b"/FLEXQUANT", b"/flexquant/requests/a/b"):
        assert caller.get(path, key).status == 404
    for response in (b"c", b"cmpl-", b"%00", b"%ff", b"%ed%a0%80", b".*", b"a" * 60_000):
        assert caller.get(b"/flexquant/requests/" + response, key).status == 404


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("schemathesis"), reason="`make test-full` installs Schemathesis")
def test_schemathesis_finds_nothing_that_the_openapi_schema_does_not_say(url: str, tmp_path: Path) -> None:
    """The test comes last: it changes the policy. The schema says only in part what is refused (422)."""
    (tmp_path / "schemathesis.toml").write_text(
        f"""[auth.openapi]
"vLLM's key" = {{ bearer = "{KEY}" }}
"administrator's key" = {{ bearer = "{ADMIN}" }}
[checks.positive_data_acceptance]
expected-statuses = ["2xx", 404, 409, 422]
"""
    )
    command = ["schemathesis", "run", f"{url}/openapi.json", "--include-path-regex", "^/flexquant"]
    command += ["--checks", "all", "--max-examples", "200", "--seed", "1", "--request-timeout", "300"]
    done = programs.run([*command, "--continue-on-failure"], timeout=3000, folder=tmp_path)
    assert "Tested: 4" in done.stdout
    assert re.search(r"[1-9]\d\d generated", done.stdout)
