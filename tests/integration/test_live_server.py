# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a live server tells of its passes, on vLLM's /metrics and at /flexquant, against their trace.

And how its policy is changed while it answers.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flexquant import cli
from flexquant.serving.frontend import metrics as names
from flexquant.serving.frontend.client import ADMIN_KEY
from flexquant.serving.frontend.metrics import FORWARD, POLICY, SECONDS
from flexquant.serving.worker.pass_records import SIZE_BUCKETS
from tests.integration.live_server import ADMIN, LONG, REQUESTS, Live, Served, ask_all, labelled

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


def test_passes_and_tokens_are_those_of_the_trace_and_every_pass_was_timed(served: Served) -> None:
    expected: Counter[tuple[str, frozenset[tuple[str, str]]]] = Counter()
    for p in served.passes:
        cell = labelled(("plan", p["plan"]), ("phase", p["phase"]))
        expected[f"{FORWARD}_total", cell] += 1
        expected[f"{names.TOKENS}_total", cell] += p["scheduled_tokens"]
        expected[f"{names.PADDED_TOKENS}_total", cell] += p["tokens"]
    assert {p["phase"] for p in served.passes} >= {"prefill", "decode"}
    counted = tuple(f"{metric}_total" for metric in (FORWARD, names.TOKENS, names.PADDED_TOKENS))
    for metrics in served.metrics:
        assert {key: value for key, value in metrics.items() if key[0] in counted} == expected
        assert f"{names.REPLAYS}_total" not in {name for name, _ in metrics}, "nothing is captured on a CPU"
        seconds = {labels: value for (name, labels), value in metrics.items() if name == f"{SECONDS}_total"}
        assert seconds.keys() == {labels for _, labels in expected}
        assert all(0 < value < 600 for value in seconds.values())


def test_sizes_are_those_of_the_trace(served: Served) -> None:
    expected: Counter[frozenset[tuple[str, str]]] = Counter()
    for p in served.passes:
        size = p["sequences"] if p["phase"] == "decode" else p["scheduled_tokens"]
        ends = [*(f"{end}.0" for end in SIZE_BUCKETS if size <= end), "+Inf"]
        expected.update(labelled(("plan", p["plan"]), ("phase", p["phase"]), ("le", end)) for end in ends)
    for metrics in served.metrics:
        buckets = {key: number for (name, key), number in metrics.items() if name == f"{names.SIZE}_bucket"}
        assert {key: number for key, number in buckets.items() if number} == expected


def test_policy_and_weights_are_told(served: Served) -> None:
    for metrics in served.metrics:
        told = [(dict(labels), n) for (name, labels), n in metrics.items() if name == POLICY and n]
        ((policy, value),) = told
        assert (policy["policy"], value, len(policy["digest"])) == ("phase", 1, 64)
        for variant, layers in served.status["weight_bytes_by_layers"].items():
            for run, size in layers.items():
                labels = labelled(("variant", variant), ("layers", run))
                assert metrics[names.WEIGHT_BYTES, labels] == size


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
    assert (status["plans"], status["weight_bytes"]) == (header["plans"], header["weight_bytes"])
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
    assert "refused with 409" in changed.refused and "the checkpoint has w4a16, w8a8" in changed.refused
    assert changed.dry_run["dry_run"]
    unchanged = ("policy", "plans", "routes")
    assert {k: changed.after_refusals[k] for k in unchanged} == {k: served.status[k] for k in unchanged}


def test_another_policy_is_taken_between_two_passes_of_the_requests_under_way(served: Served) -> None:
    changed = served.changed
    assert all(0 < tokens < LONG for tokens in changed.answers)
    (place,) = [i for i, record in enumerate(changed.passes) if "policy" in record]
    layered = ["w4a16", "w8a8", "w8a8", "w8a8"]
    assert changed.passes[place]["plans"] == {"w8a8": ["w8a8"] * 4, "w8a8+w4a16[0]": layered}
    parts = changed.passes[:place], changed.passes[place + 1 :]
    plans = [{p["plan"] for p in part if p["phase"] == "decode"} for part in parts]
    assert plans == [{"w4a16"}, {"w8a8+w4a16[0]"}]
    last, first = changed.passes[place - 1], changed.passes[place + 1]
    assert last["sequences"] == first["sequences"] == 3


def test_the_change_is_told(served: Served) -> None:
    changed = served.changed
    asked, told = changed.dry_run, changed.taken
    assert all(asked[key] == told[key] for key in ("before", "after", "routes"))
    assert (told["before"], told["after"]) == (served.status["policy"], changed.status["policy"])
    assert not told["captures_graphs"]
    rows = [(row["phase"], row["before"], row["after"]) for row in told["routes"]]
    assert rows == [("decode", "w4a16", "w8a8+w4a16[0]")]
    assert {row["plan"] for row in changed.status["routes"]["decode"]} == {"w8a8+w4a16[0]"}


def test_metrics_tell_which_policy_routes(served: Served) -> None:
    for metrics in served.changed.metrics:
        told = {dict(labels)["policy"]: value for (name, labels), value in metrics.items() if name == POLICY}
        routing = [name for name, routes in told.items() if routes]
        assert told["phase"] == 0 and routing == [served.changed.status["policy"]["name"]]
        decodes = [dict(labels)["plan"] for name, labels in metrics if name == f"{FORWARD}_total"]
        assert "w8a8+w4a16[0]" in decodes


def test_the_command_tells_what_a_change_would_do(served: Served, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.delenv(ADMIN_KEY, raising=False)
    assert cli.main(["policy", "apply", "http://127.0.0.1:9", "w8a8"]) == 1
    assert f"the environment has no {ADMIN_KEY}" in capsys.readouterr().err
    monkeypatch.setenv(ADMIN_KEY, ADMIN)
    for url, said in (
        ("http://127.0.0.1:9", "no answer from http://127.0.0.1:9"),
        ("http://127.0.0.1:9a", "no answer from http://127.0.0.1:9a (nonnumeric port"),
        ("127.0.0.1:8000", "no URL of a server"),
    ):
        assert cli.main(["policy", "apply", url, "w8a8"]) == 1 and said in capsys.readouterr().err
