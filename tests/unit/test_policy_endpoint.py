# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A posted policy is resolved, and taken by the data-parallel engines that still have the policy seen before.

The engines are stand-ins, so that a test chooses what happens between two questions to them; what a real one
does when it is asked is in tests/integration/test_policy_change, and two real ones are in test_data_parallel.
"""

import asyncio
import json
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm import EngineArgs
from vllm.config import VllmConfig

from benchmarks.speed.shapes import SHAPES
from flexquant.checkpoint.merged_config import ARCHITECTURE, MergedConfig, StoredVariant
from flexquant.policy.rules import load_policy
from flexquant.serving.frontend import endpoints
from flexquant.serving.frontend.client import ADMIN_KEY
from flexquant.serving.frontend.endpoints import FlexQuantEndpoints, sum_up
from flexquant.serving.registration import WORKER_EXTENSION

ADMIN = "an administrator's key"
HEADERS = {"Authorization": f"Bearer {ADMIN}"}
KEYS = ["one key", "another key"]
POLICY = json.dumps({"schema": "flexquant.policy/v1", "rules": [{"use": "w8a8"}]})


class Engine:
    """Stands in for an engine; the policy that it routes by is only a name."""

    def __init__(self, between: Callable[[], None] = lambda: None) -> None:
        """``between`` is called before the engine is asked to take a policy."""
        self.policy, self.between, self.captures = "before", between, False
        self.may_change = asyncio.Event()
        """A change waits for it."""
        self.may_change.set()
        self.is_asked = asyncio.Lock()
        """Held while it is asked, since it answers in the order of the questions."""

    def flexquant_change_policy(self, policy: Any, dry_run: bool, seen: list[str] | None) -> dict[str, Any]:
        told = {"before": described(self.policy), "after": described(policy["name"])}
        if not dry_run:
            self.between()
            if seen is not None and self.policy not in seen:
                return {"refused": f"{self.policy} has been taken"}
            self.policy = policy["name"]
        return {**told, "captures_graphs": self.captures, "routes": []}


def described(name: str) -> dict[str, str]:
    return {"name": name, "digest": name}


class EnginesClient:
    """Stands in for vLLM's client of several engines, as far as they are asked by name."""

    def __init__(self, engines: list[Engine], vllm_config: object) -> None:
        self.core_engines, self.engine_core = engines, self
        self.paused, self.vllm_config = False, vllm_config

    async def _call_utility_async(self, _, method, timeout, args, kwargs, *, engine: Engine) -> list[Any]:
        assert timeout is None, "vLLM would give an answer that comes later to the next question"
        async with engine.is_asked:
            if method == "flexquant_change_policy" and args[1] is False:
                await engine.may_change.wait()
            return [getattr(engine, method)(*args)]

    async def is_paused(self) -> bool:
        return self.paused

    async def pause_generation(self, **_: Any) -> None:
        self.paused = True

    async def resume_generation(self) -> None:
        for engine in self.core_engines:
            async with engine.is_asked:
                pass
        self.paused = False


Post = Callable[..., tuple[int, Any]]


def configured(folder: Path, flexquant: dict[str, Any], **recorded: Any) -> VllmConfig:
    """Return the configuration of a server of a merged checkpoint of which there is only config.json."""
    variants = {n: StoredVariant(f"{n}.", {"config_groups": {}}, True, False) for n in ("w8a8", "w4a16")}
    section = MergedConfig("LlamaForCausalLM", variants, **recorded).to_json()
    config = SHAPES["tiny"].config() | {"architectures": [ARCHITECTURE], "quantization_config": section}
    (folder / "config.json").write_text(json.dumps(config))
    options = {"additional_config": {"flexquant": flexquant}, "enforce_eager": True}
    return EngineArgs(str(folder), skip_tokenizer_init=True, **options).create_engine_config()


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return configured(tmp_path_factory.mktemp("merged"), {})


@pytest.fixture
def app(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    """Return a server's app; a parameter is what the environment has as the administrator's key."""
    monkeypatch.setenv(ADMIN_KEY, getattr(request, "param", ADMIN))
    app = FastAPI()
    FlexQuantEndpoints().attach_router(app)
    app.state.args = Namespace(api_key=KEYS)
    return app


@pytest.fixture
def post(app: FastAPI, vllm_config: VllmConfig) -> Iterator[Post]:
    """Yield a function that posts a policy called ``mine`` to these engines and returns code and answer."""
    with TestClient(app, raise_server_exceptions=False) as client:

        def ask(*engines: Engine, policy: str = POLICY) -> tuple[int, Any]:
            app.state.flexquant_engine = EnginesClient([*engines], vllm_config)
            reply = client.post("/flexquant/policy?name=mine", content=policy, headers=HEADERS)
            return reply.status_code, reply.json() if reply.status_code < 500 else None

        yield ask


@asynccontextmanager
async def posting(app: FastAPI) -> AsyncIterator[asyncio.Task[httpx.Response]]:
    """Post a policy, called ``mine``, beside what the test does; the reply is the task's."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        yield asyncio.create_task(client.post("/flexquant/policy?name=mine", content=POLICY, headers=HEADERS))


def test_a_policy_that_does_not_fit_is_refused_before_an_engine_is_asked(post):
    engine = Engine()
    use = {"default": "w8a8", "layers": {"99": "w4a16"}}
    code, told = post(engine, policy=json.dumps({"schema": "flexquant.policy/v1", "rules": [{"use": use}]}))
    assert code == 409 and "names layer 99, but the model has" in told["detail"]
    assert engine.policy == "before"


@pytest.mark.parametrize(("consent", "code"), [({}, 409), ({"allow_incompatible_kv": True}, 200)])
def test_a_policy_of_variants_that_share_no_cache_needs_the_servers_consent(consent, code, app, tmp_path):
    apart = {"compatible": False, "message": "k_proj is doubled"}
    config = configured(tmp_path, {"policy": "w8a8", **consent}, kv_compatibility=apart)
    app.state.flexquant_engine = EnginesClient([Engine()], config)
    with TestClient(app) as client:
        for policy, expected in (("phase", code), ("w8a8", 200)):
            document = json.dumps(load_policy(policy).document)
            reply = client.post("/flexquant/policy", content=document, headers=HEADERS)
            assert reply.status_code == expected, reply.text
            assert expected == 200 or "allow_incompatible_kv" in reply.json()["detail"]


def test_an_engine_that_has_taken_another_meanwhile_keeps_it_and_the_answer_says_so(post):
    engines = [Engine(), Engine(lambda: setattr(engines[1], "policy", "theirs"))]
    code, told = post(*engines)
    said = "theirs has been taken; other engines have taken mine: GET /flexquant tells their policies"
    assert (code, told["detail"]) == (409, f"{said}; apply one policy to all again")
    assert [engine.policy for engine in engines] == ["mine", "theirs"]


class RefusingEngine(Engine):
    """Stands in for an engine that cannot take a policy, and says so when it is first asked."""

    def flexquant_change_policy(self, *_: object) -> dict[str, Any]:
        return {"refused": "it has no memory for graphs"}


def test_what_an_engine_refuses_when_first_asked_or_later_no_other_has_taken(post):
    engines = [Engine(), RefusingEngine()]
    code, told = post(*engines)
    assert (code, told["detail"], engines[0].policy) == (409, "it has no memory for graphs", "before")
    engine = Engine(lambda: setattr(engine, "policy", "theirs"))
    code, told = post(engine)
    assert (code, told["detail"], engine.policy) == (409, "theirs has been taken", "theirs")


@pytest.mark.parametrize("captures", [False, True])
def test_a_change_that_takes_long_goes_on(captures, app, vllm_config, monkeypatch):
    async def scenario() -> None:
        monkeypatch.setattr(endpoints, "CAPTURE_TIMEOUT", 0.01)
        slow, fast = both = [Engine(), Engine()]
        slow.captures = captures
        slow.may_change.clear()
        app.state.flexquant_engine = EnginesClient(both, vllm_config)
        async with posting(app) as answer:
            reply = await answer
            assert reply.status_code == 504
            assert "it is still under way: GET /flexquant tells" in reply.json()["detail"]
            assert [slow.policy, fast.policy] == ["before", "mine"]
            assert app.state.flexquant_engine.paused == captures
            slow.may_change.set()
            while slow.policy != "mine" or app.state.flexquant_engine.paused:
                await asyncio.sleep(0)
        assert fast.policy == "mine"

    asyncio.run(asyncio.wait_for(scenario(), 30))


@pytest.mark.parametrize("paused", [False, True])
def test_an_operators_own_pause_stays(paused, app, vllm_config):
    engine = Engine()
    engine.captures = True
    app.state.flexquant_engine = client = EnginesClient([engine], vllm_config)
    client.paused = paused
    with TestClient(app) as asking:
        assert asking.post("/flexquant/policy?name=mine", content=POLICY, headers=HEADERS).status_code == 200
    assert (engine.policy, client.paused) == ("mine", paused)


def test_the_status_says_where_engines_disagree():
    one, other, namesake = (
        {"policy": policy, "counted": [{"plan": "p", "phase": "decode", "forward": 2}]}
        for policy in (described("one"), described("other"), described("one") | {"digest": "edited"})
    )
    counted = [{"plan": "p", "phase": "decode", "forward": 4}]
    assert sum_up([one, one]) == {"policy": described("one"), "counted": counted, "ranks": 2}
    assert sum_up([one, other, one])["disagreement"] == [described("one"), described("other")]
    assert sum_up([one, namesake])["disagreement"] == [one["policy"], namesake["policy"]]
    assert "disagreement" not in sum_up([one, one | {"policy": {"name": "a copy", "digest": "one"}}])


@pytest.mark.parametrize(("key", "code"), [(KEYS[0], 404), (KEYS[1], 404), (KEYS[0] + KEYS[1], 401)])
def test_every_key_of_vllms_is_taken(app, key, code, monkeypatch):
    """With a key of vLLM's, by an option or else a variable, the answer is that nothing merged is served."""
    parallel = SimpleNamespace(worker_extension_cls=WORKER_EXTENSION)
    not_merged = SimpleNamespace(model_config=SimpleNamespace(quantization=None), parallel_config=parallel)
    app.state.flexquant_engine = EnginesClient([], not_merged)
    with TestClient(app) as client:
        assert client.get("/flexquant", headers={"Authorization": f"Bearer {key}"}).status_code == code
        monkeypatch.setenv("VLLM_API_KEY", KEYS[1])
        for by_option, expected in ((KEYS[:1], KEYS[0]), (None, KEYS[1])):
            app.state.args.api_key = by_option
            reply = client.get("/flexquant", headers={"Authorization": f"Bearer {key}"})
            assert reply.status_code == (404 if key == expected else 401)


@pytest.mark.parametrize("app", [f"{ADMIN}\n", f" {ADMIN}\t"], indirect=True)
def test_space_around_the_administrators_key_is_none_of_it(post):
    assert post(Engine())[0] == 200
