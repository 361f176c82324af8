# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a live server tells of its passes, on vLLM's /metrics and at /flexquant, against their trace.

And how its policy is changed while it answers.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from flexquant import cli
from flexquant.errors import FlexQuantError
from flexquant.measuring.server import vllm_serve
from flexquant.policy.rules import load_policy
from flexquant.serving.client import ADMIN_KEY, apply_policy
from flexquant.serving.metric_names import (
    FORWARD,
    PADDED_TOKENS,
    POLICY,
    REPLAYS,
    SECONDS,
    SIZE_BUCKETS,
    TOKENS,
    WEIGHT_BYTES,
)
from flexquant.serving.metrics import FOLDER
from flexquant.tuning.traffic import Traffic, watch
from tests.policies import LAYERED_DECODE

pytestmark = pytest.mark.engine
KEY = "a key"
ADMIN = "an administrator's key"
BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
)


Metrics = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""The samples of one scrape, by name and labels."""


class Changed(NamedTuple):
    """What came of policies that were posted, in order."""

    codes: dict[str, int]
    """HTTP status codes of those that have to be refused."""
    refused: str
    """What ``flexquant policy apply`` said of one of them."""
    after_refusals: dict[str, Any]
    """The status after these and a dry run."""
    dry_run: dict[str, Any]
    taken: dict[str, Any]
    """What the server said of one that it took, while it answered."""
    answers: list[int]
    """Tokens of the answers that it gave meanwhile."""
    status: dict[str, Any]
    metrics: list[Metrics]
    passes: list[dict[str, Any]]
    """Of the trace, what it says of the policy included."""


class Served(NamedTuple):
    metrics: list[Metrics]
    """Of several requests: by sample and labels."""
    status: dict[str, Any]
    """From /flexquant, with the key."""
    refused: list[int]
    """HTTP status codes without the key, and with others."""
    header: dict[str, Any]
    passes: list[dict[str, Any]]
    changed: Changed
    answered: list[tuple[int, Any]]
    """What /flexquant/requests says of a response to two prompts, of one with two answers, and of none."""
    traffic: Traffic
    """All that the server has had, before the last change too."""
    all_passes: list[dict[str, Any]]
    proposal: Path


@contextmanager
def plugin_routes() -> Iterator[None]:
    """Servers that start here have the routes of vLLM's plugins of this name.

    Whatever they inherit: another engine of the process that starts them has its own metrics.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, "/nowhere")
        patch.setenv("VLLM_PLUGINS", "flexquant")
        patch.setenv(ADMIN_KEY, ADMIN)
        yield


def scrape(url: str) -> Metrics:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def get_status(url: str, authorization: str | None) -> tuple[int, Any]:
    return ask(f"{url}/flexquant", authorization)


def ask(url: str, authorization: str | None, body: bytes | None = None) -> tuple[int, Any]:
    headers = {"Authorization": authorization} if authorization is not None else {}
    request = urllib.request.Request(url, data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as e:
        return e.code, None


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.full)], ids=["one server", "two servers"]
)
def served(request: pytest.FixtureRequest, tiny_merged: Any, tmp_path_factory: Any) -> Served:
    merged: Path = tiny_merged() / "merged"
    trace: Path = tmp_path_factory.mktemp("metrics") / "routes.jsonl"
    options = json.dumps({"flexquant": {"policy": "phase", "trace": str(trace), "requests": True}})
    arguments = ["--additional-config", options, "--enforce-eager", "--max-model-len", "256"]
    arguments += ["--api-server-count", str(request.param), "--served-model-name", "tiny"]
    arguments += ["--api-key", KEY]
    with plugin_routes(), vllm_serve(merged, *arguments) as url:
        client = OpenAI(base_url=url, api_key=KEY)

        def complete(number: int) -> None:
            prompt = list(range(10, 20 + 9 * number))
            client.completions.create(
                model="tiny", prompt=prompt, max_tokens=4 + number, extra_body={"ignore_eos": True}
            )

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(complete, range(12)))
        root = url.removesuffix("/v1")
        metrics = [scrape(root) for _ in range(4 * request.param)]
        code, status = get_status(root, f"Bearer {KEY}")
        assert code == 200
        wrong = [None, "", "Bearer", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer \u00fc"]
        refused = [get_status(root, authorization)[0] for authorization in wrong]
        header, *passes = [json.loads(line) for line in trace.read_text().splitlines()]
        two = client.completions.create(
            model="tiny", prompt=[[11] * 30, [12] * 40], max_tokens=6, extra_body={"ignore_eos": True}
        )
        again = client.completions.create(
            model="tiny", prompt=[13] * 20, max_tokens=6, n=2, extra_body={"ignore_eos": True}
        )
        names = (two.id, again.id, "cmpl-nobodys", "cmpl-")
        answered = [ask(f"{root}/flexquant/requests/{name}", f"Bearer {KEY}") for name in names]
        refused.append(ask(f"{root}/flexquant/requests/{two.id}", None)[0])
        folder = tmp_path_factory.mktemp("policies")
        changed = change_policies(root, client, trace, folder, 4 * request.param)
        traffic = watch(root, 0)
        proposal = propose(merged, root, folder)
    every = [record for line in trace.read_text().splitlines() if "phase" in (record := json.loads(line))]
    return Served(metrics, status, refused, header, passes, changed, answered, traffic, every, proposal)


def propose(merged: Path, root: str, folder: Path) -> Path:
    """Have ``flexquant tune`` propose a policy, from times by which W4A16 is the faster everywhere."""
    curves = {"w8a8": {"1": [9, 9, 9], "64": [99, 99, 99]}, "w4a16": {"1": [1, 1, 1], "64": [11, 11, 11]}}
    times = {"origin": {}, "context": 16, "context_ns": 0, "decode_ms": curves, "prefill_ms": curves}
    document = {"schema": "flexquant.policy/v1", "rules": [{"use": "w8a8"}], "measured": times}
    (folder / "times.yaml").write_text(json.dumps(document))
    output = folder / "proposed.yaml"
    arguments = ["--from-metrics", root, "--seconds", "0", "--times", str(folder / "times.yaml")]
    assert cli.main(["tune", str(merged), "--output", str(output), *arguments]) == 0
    return output


def change_policies(root: str, client: OpenAI, trace: Path, folder: Path, scrapes: int) -> Changed:
    """Post policies to a server that takes ``phase``, good ones and bad ones."""
    own = (folder / "own.yaml").as_posix()
    Path(own).write_text(LAYERED_DECODE)
    post = f"{root}/flexquant/policy"
    good = b"{schema: flexquant.policy/v1, rules: [{use: w8a8}]}"
    codes = {
        "no key": ask(post, None, good)[0],
        "vLLM's key": ask(post, f"Bearer {KEY}", good)[0],
        "no policy": ask(post, f"Bearer {ADMIN}", b"")[0],
        "not YAML": ask(post, f"Bearer {ADMIN}", b"{rules: [")[0],
        "no rules": ask(post, f"Bearer {ADMIN}", b"{schema: flexquant.policy/v1, rules: []}")[0],
        "aliases": ask(post, f"Bearer {ADMIN}", BOMB.encode())[0],
        "large": ask(post, f"Bearer {ADMIN}", b"#" * (1 << 20) + good)[0],
        "bad name": ask(f"{post}?name=a%0Ab", f"Bearer {ADMIN}", good)[0],
        "not loaded": ask(post, f"Bearer {ADMIN}", good.replace(b"w8a8", b"fp8"))[0],
    }
    with pytest.raises(FlexQuantError) as refused:
        apply_policy(root, load_policy("fp8-phase-batch"))
    dry_run = apply_policy(f"{root}/v1", load_policy(own), dry_run=True)
    after_refusals = get_status(root, f"Bearer {KEY}")[1]
    before = len(trace.read_text().splitlines())

    def complete(number: int) -> int:
        reply = client.completions.create(
            model="tiny",
            prompt=list(range(10, 30 + number)),
            max_tokens=60,
            extra_body={"ignore_eos": True},
            stream=True,
            stream_options={"include_usage": True},
        )
        *_, last = reply
        return last.usage.completion_tokens

    with ThreadPoolExecutor(3) as pool:
        under_way = [pool.submit(complete, number) for number in range(3)]
        while len(trace.read_text().splitlines()) < before + 8:
            assert not all(future.done() for future in under_way)
        taken = apply_policy(root, load_policy(own))
        answers = [future.result() for future in under_way]
    status = get_status(root, f"Bearer {KEY}")[1]
    metrics = [scrape(root) for _ in range(scrapes)]
    passes = [json.loads(line) for line in trace.read_text().splitlines()][before:]
    return Changed(
        codes, str(refused.value), after_refusals, dry_run, taken, answers, status, metrics, passes
    )


def labelled(*labels: tuple[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset((("model_name", "tiny"), ("engine", "0"), *labels))


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


def test_policy_and_weights_are_told(served: Served) -> None:
    for metrics in served.metrics:
        ((policy, value),) = [
            (dict(labels), value) for (name, labels), value in metrics.items() if name == POLICY
        ]
        assert (policy["policy"], value) == ("phase", 1)
        assert len(policy["digest"]) == 64
        for variant, size in served.header["weight_bytes"].items():
            assert metrics[WEIGHT_BYTES, labelled(("variant", variant))] == size


def test_vllms_own_metrics_are_there_once(served: Served) -> None:
    for metrics in served.metrics:
        prompts = [v for (name, _), v in metrics.items() if name == "vllm:request_success_total"]
        assert sum(prompts) == 12


def test_the_status_is_what_the_trace_says(served: Served) -> None:
    status, header = served.status, served.header
    assert status["policy"]["name"] == header["policy"] == "phase"
    assert status["plans"] == header["plans"]
    assert status["weight_bytes"] == header["weight_bytes"]
    assert status["kernels"].keys() == header["plans"].keys()
    assert all("Kernel" in kernel for (kernel,) in status["kernels"].values())
    routes = {phase: [row["plan"] for row in rows] for phase, rows in status["routes"].items()}
    assert routes == {"prefill": ["w8a8"], "decode": ["w4a16"], "mixed": ["w8a8"]}
    counted = {(cell["plan"], cell["phase"]): cell["forward"] for cell in status["counted"]}
    assert counted == Counter((p["plan"], p["phase"]) for p in served.passes)


def test_the_status_asks_for_vllms_key(served: Served) -> None:
    assert served.refused == [401] * 7


def test_a_response_can_be_asked_which_plans_served_it(served: Served) -> None:
    (found, of_two), (found_again, of_n), *missing = served.answered
    assert (found, found_again, *(code for code, _ in missing)) == (200, 200, 404, 404)
    plans = [[(run["plan"], run["tokens"]) for run in request["plans"]] for request in of_two["requests"]]
    assert [sum(tokens for _, tokens in runs) for runs in plans] == [30 + 5, 40 + 5]
    for runs, prompt in zip(plans, (30, 40), strict=True):
        assert runs[0][0] == "w8a8" and runs[0][1] >= prompt
        assert runs[-1][0] == "w4a16"
    tokens = [sum(run["tokens"] for run in request["plans"]) for request in of_n["requests"]]
    assert tokens == [20 + 5] * 2


def test_the_trace_names_the_requests_of_each_pass(served: Served) -> None:
    for p in served.passes:
        assert len(p["requests"]) == p["sequences"]
        assert sum(p["requests"].values()) == p["scheduled_tokens"]
    assert len({name for p in served.passes for name in p["requests"]}) == 12


def test_who_has_not_the_administrators_key_changes_nothing(served: Served) -> None:
    assert served.changed.codes["no key"] == served.changed.codes["vLLM's key"] == 401


def test_what_is_no_policy_and_what_cannot_be_served_changes_nothing(served: Served) -> None:
    changed = served.changed
    codes = {what: code for what, code in changed.codes.items() if "key" not in what}
    assert codes.pop("large") == 413
    assert codes.pop("not loaded") == 409
    assert set(codes.values()) == {422}
    assert "refused with 409" in changed.refused
    assert "the checkpoint has w4a16, w8a8" in changed.refused
    assert changed.dry_run["dry_run"]
    unchanged = ("policy", "plans", "routes")
    assert {k: changed.after_refusals[k] for k in unchanged} == {k: served.status[k] for k in unchanged}


def test_another_policy_is_taken_between_two_passes_of_the_requests_under_way(served: Served) -> None:
    changed = served.changed
    assert changed.answers == [60, 60, 60]
    (place,) = [i for i, record in enumerate(changed.passes) if "policy" in record]
    assert changed.passes[place]["plans"] == {
        "w8a8": ["w8a8"] * 4,
        "w8a8+w4a16[0]": ["w4a16", "w8a8", "w8a8", "w8a8"],
    }
    plans = [{p["plan"] for p in part if p["phase"] == "decode"} for part in split(changed.passes, place)]
    assert plans == [{"w4a16"}, {"w8a8+w4a16[0]"}]
    assert sum(p["scheduled_tokens"] for p in changed.passes if "phase" in p) == sum(
        20 + n + 59 for n in range(3)
    )


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
        assert policies == {"phase": 0, served.changed.status["policy"]["name"]: 1}
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


def test_the_traffic_that_a_policy_is_proposed_for_is_that_of_the_trace(served: Served) -> None:
    found: Counter[tuple[str, str, int]] = Counter()
    for cell in served.traffic.cells:
        found[cell.plan, cell.phase, bisect_left(SIZE_BUCKETS, cell.size)] += round(cell.passes)
    expected: Counter[tuple[str, str, int]] = Counter()
    for p in served.all_passes:
        size = p["sequences"] if p["phase"] == "decode" else p["scheduled_tokens"]
        expected[p["plan"], p["phase"], bisect_left(SIZE_BUCKETS, size)] += 1
    assert found == expected
    assert sorted(served.traffic.variants) == ["shared", "w4a16", "w8a8"]


def test_a_proposal_is_a_policy_and_changes_nothing(served: Served) -> None:
    policy = load_policy(str(served.proposal))
    assert policy.variants == ("w4a16",), "by these times nothing else pays"
    text = served.proposal.read_text()
    assert f"{served.traffic.passes} passes under {served.traffic.policy}" in text
    assert "nothing has been applied" in text
    assert served.traffic.policy == served.changed.status["policy"]["name"]
