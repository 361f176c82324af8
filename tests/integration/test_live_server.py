# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a live server tells of its passes, on vLLM's /metrics and at /flexquant, against their trace.

And how its policy is changed while it answers, and that hostile callers, by hand and by Schemathesis, cannot
break its routes or keep others waiting.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flexquant import cli
from flexquant.serving.frontend.client import ADMIN_KEY
from flexquant.serving.frontend.metrics import (
    FORWARD,
    PADDED_TOKENS,
    POLICY,
    REPLAYS,
    SECONDS,
    SIZE,
    TOKENS,
    WEIGHT_BYTES,
)
from flexquant.serving.worker.pass_records import SIZE_BUCKETS
from tests import programs
from tests.integration.hostile_callers import ENDLESS, Caller
from tests.integration.hostile_callers import POLICY as GOOD
from tests.integration.live_server import (
    ADMIN,
    KEY,
    LONG,
    REQUESTS,
    Live,
    Served,
    ask_all,
    labelled,
)

pytestmark = pytest.mark.engine


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.full)], ids=["one server", "two servers"]
)
def served(request: pytest.FixtureRequest, live: Live, tiny_merged: Any, tmp_path_factory: Any) -> Served:
    folder: Path = tmp_path_factory.mktemp("policies")
    if request.param == 1:
        return ask_all(live, folder, 4)
    several = Live(tiny_merged() / "merged", folder, "--api-server-count", str(request.param))
    try:
        return ask_all(several, folder, 4 * request.param)
    finally:
        several.stop()


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


def test_sizes_are_those_of_the_trace(served: Served) -> None:
    expected: Counter[frozenset[tuple[str, str]]] = Counter()
    for p in served.passes:
        size = p["sequences"] if p["phase"] == "decode" else p["scheduled_tokens"]
        ends = [*(f"{end}.0" for end in SIZE_BUCKETS if size <= end), "+Inf"]
        expected.update(labelled(("plan", p["plan"]), ("phase", p["phase"]), ("le", end)) for end in ends)
    for metrics in served.metrics:
        buckets = {key: number for (name, key), number in metrics.items() if name == f"{SIZE}_bucket"}
        assert {key: number for key, number in buckets.items() if number} == expected


def test_policy_and_weights_are_told(served: Served) -> None:
    for metrics in served.metrics:
        ((policy, value),) = [
            (dict(labels), value) for (name, labels), value in metrics.items() if name == POLICY and value
        ]
        assert (policy["policy"], value) == ("phase", 1)
        assert len(policy["digest"]) == 64
        for variant, layers in served.status["weight_bytes_by_layers"].items():
            for run, size in layers.items():
                assert metrics[WEIGHT_BYTES, labelled(("variant", variant), ("layers", run))] == size


def test_vllms_own_metrics_are_there_once(served: Served) -> None:
    for metrics in served.metrics:
        earlier, now = (
            sum(v for (name, _), v in found.items() if name == "vllm:request_success_total")
            for found in (served.before, metrics)
        )
        assert now - earlier == REQUESTS


def test_the_status_is_what_the_trace_says(served: Served) -> None:
    status, header = served.status, served.header
    assert status["policy"]["name"] == header["policy"] == "phase"
    assert status["plans"] == header["plans"]
    assert status["weight_bytes"] == header["weight_bytes"]
    by_layers = {variant: sum(sizes.values()) for variant, sizes in status["weight_bytes_by_layers"].items()}
    assert by_layers == status["weight_bytes"]
    assert status["kernels"].keys() == header["plans"].keys()
    assert all("Kernel" in kernel for (kernel,) in status["kernels"].values())
    routes = {phase: [row["plan"] for row in rows] for phase, rows in status["routes"].items()}
    assert routes == {"prefill": ["w8a8"], "decode": ["w4a16"], "mixed": ["w8a8"]}
    counted = {(cell["plan"], cell["phase"]): cell["forward"] for cell in status["counted"]}
    assert counted == Counter((p["plan"], p["phase"]) for p in served.passes)


def test_what_cannot_be_served_changes_nothing(served: Served) -> None:
    changed = served.changed
    assert "refused with 409" in changed.refused
    assert "the checkpoint has w4a16, w8a8" in changed.refused
    assert changed.dry_run["dry_run"]
    unchanged = ("policy", "plans", "routes")
    assert {k: changed.after_refusals[k] for k in unchanged} == {k: served.status[k] for k in unchanged}


def test_another_policy_is_taken_between_two_passes_of_the_requests_under_way(served: Served) -> None:
    changed = served.changed
    assert all(0 < tokens < LONG for tokens in changed.answers)
    (place,) = [i for i, record in enumerate(changed.passes) if "policy" in record]
    assert changed.passes[place]["plans"] == {
        "w8a8": ["w8a8"] * 4,
        "w8a8+w4a16[0]": ["w4a16", "w8a8", "w8a8", "w8a8"],
    }
    plans = [{p["plan"] for p in part if p["phase"] == "decode"} for part in split(changed.passes, place)]
    assert plans == [{"w4a16"}, {"w8a8+w4a16[0]"}]
    last, first = changed.passes[place - 1], changed.passes[place + 1]
    assert last["sequences"] == first["sequences"] == 3


def split(records: list[Any], place: int) -> tuple[list[Any], list[Any]]:
    return records[:place], records[place + 1 :]


def test_the_change_is_told(served: Served) -> None:
    changed = served.changed
    asked, told = changed.dry_run, changed.taken
    assert {k: asked[k] for k in ("before", "after", "routes")} == {
        k: told[k] for k in ("before", "after", "routes")
    }
    assert told["before"] == served.status["policy"]
    assert told["after"] == changed.status["policy"]
    assert not told["captures_graphs"]
    assert [(row["phase"], row["before"], row["after"]) for row in told["routes"]] == [
        ("decode", "w4a16", "w8a8+w4a16[0]")
    ]
    assert {row["plan"] for row in changed.status["routes"]["decode"]} == {"w8a8+w4a16[0]"}


def test_metrics_tell_which_policy_routes(served: Served) -> None:
    for metrics in served.changed.metrics:
        policies = {
            dict(labels)["policy"]: value for (name, labels), value in metrics.items() if name == POLICY
        }
        assert policies["phase"] == 0
        assert [name for name, routes in policies.items() if routes] == [
            served.changed.status["policy"]["name"]
        ]
        decodes = [dict(labels)["plan"] for name, labels in metrics if name == f"{FORWARD}_total"]
        assert "w8a8+w4a16[0]" in decodes


def test_the_command_tells_what_a_change_would_do(served: Served, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(cli, "SUBCOMMANDS", ("policy",))
    monkeypatch.delenv(ADMIN_KEY, raising=False)
    assert cli.main(["policy", "apply", "http://127.0.0.1:9", "w8a8"]) == 1
    assert f"the environment has no {ADMIN_KEY}" in capsys.readouterr().err
    monkeypatch.setenv(ADMIN_KEY, ADMIN)
    assert cli.main(["policy", "apply", "http://127.0.0.1:9", "w8a8"]) == 1
    assert "no answer from http://127.0.0.1:9" in capsys.readouterr().err
    assert cli.main(["policy", "apply", "127.0.0.1:8000", "w8a8"]) == 1
    assert "no URL of a server" in capsys.readouterr().err


BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
)
WRONG = (b"", b"Bearer", b"Bearer ", b"Basic a key", b"Bearer a", b"Bearer a key, Bearer a key")
WRONG += (
    b"Bearer a\0key",
    b"Bearer \xff\xfe",
    b"Bearer " + b"k" * 50000,
    b"a key",
    b"Bearer an administrator",
)
GUARDED = ((b"GET", b"/flexquant"), (b"POST", b"/flexquant/policy"))

RULES = '{{"schema": "flexquant.policy/v1", "rules": [{{"use": "w8a8"}}], {}}}'
NO_POLICIES = {
    "nothing": b"",
    "not closed": b'{"schema": ',
    "a list": b"[1, 2]",
    "two documents": GOOD + b"\n---\n" + GOOD,
    "a NUL": GOOD + b"\0",
    "half UTF-8": b"\xc3" + GOOD,
    "half UTF-16": b"\xff\xfe" + GOOD,
    "half a character": RULES.format('"description": "\\ud83d"').encode(),
    "a huge number": GOOD.replace(
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
    "no rules": b"{schema: flexquant.policy/v1, rules: []}",
    "too many rules": b'{"schema": "flexquant.policy/v1", "rules": [' + b'{"use": "w8a8"},' * 100 + b"]}",
}


@pytest.fixture
def caller(live: Live) -> Iterator[Caller]:
    """Yield a caller; whatever it does, the server then serves the same policy, and has failed at nothing."""
    caller = Caller(live.url, KEY, ADMIN)
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
    assert answer.status == 422
    assert answer.body["error"]["message"].startswith("posted policy")


def test_a_query_that_is_wrong_is_refused(caller: Caller) -> None:
    queries = {b"?name=": 400, b"?name=" + b"a" * 201: 400, b"?name=%00": 422, b"?name=%e2%80%ae": 422}
    queries |= {b"?dry_run=perhaps": 400, b"?dry_run=": 400, b"?dry_run=true&dry_run=perhaps": 400}
    assert {query: caller.post(GOOD, query).status for query in queries} == queries


def test_a_body_without_an_end_is_read_up_to_a_limit_and_from_an_administrator_alone(caller: Caller) -> None:
    for headers, status in (((b"Authorization: " + caller.admin,), 413), ((), 401)):
        answer, sent = caller.post_endlessly(*headers)
        assert answer.status == status
        assert sent < ENDLESS
    assert caller.post(b"#" * (1 << 17) + GOOD).status == 413
    assert caller.post(b"#" * 100_000 + b"\n" + GOOD, b"?dry_run=true").status == 200


def test_nobody_waits_for_a_body_that_does_not_come(caller: Caller) -> None:
    with caller.unfinished():
        assert caller.get(b"/flexquant", b"Authorization: " + caller.key).status == 200
        assert caller.post(GOOD, b"?dry_run=true").status == 200


def test_nobody_waits_for_a_body_that_is_slow_to_read(caller: Caller) -> None:
    assert caller.answers_while_it_reads(b"[" * 3000 + b"]" * 3000) > 5


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
    assert "Tested: 3" in done.stdout
    assert re.search(r"[1-9]\d\d generated", done.stdout)
