# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A posted policy is taken by all data-parallel engines or by none, whatever comes between.

The engines are stand-ins, so that a test chooses what happens between two questions to them; what a real one
does when it is asked is in tests/integration/test_policy_change, and two real ones are in test_data_parallel.
"""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from flexquant.checkpoint.merged_config import QUANT_METHOD
from flexquant.serving.frontend import policy_endpoint
from flexquant.serving.frontend.client import ADMIN_KEY
from flexquant.serving.frontend.endpoints import FlexQuantEndpoints, sum_up
from flexquant.serving.registration import WORKER_EXTENSION

ADMIN = "an administrator's key"
KEYS = ["one key", "another key"]
POLICY = json.dumps({"schema": "flexquant.policy/v1", "rules": [{"use": "w8a8"}]})


class Engine:
    """Stands in for an engine; the policy that it routes by is only a name."""

    def __init__(self, between: Callable[[], None] = lambda: None) -> None:
        """``between`` is called before the engine is asked to take a policy."""
        self.policy = "before"
        self.changes: dict[str, str] = {}
        self.between = between
        self.captures = False
        self.cannot_go_back = False
        self.may_change = asyncio.Event()
        """A change waits for it."""
        self.may_change.set()
        self.is_asked = asyncio.Lock()
        """Held while it is asked, since it answers in the order of the questions."""

    def flexquant_change_policy(
        self, name: str, document: dict[str, Any], dry_run: bool, seen: tuple[str, ...] = (), change: str = ""
    ) -> dict[str, Any]:
        told = {"before": described(self.policy), "after": described(name)}
        if not dry_run:
            self.between()
            if self.policy not in seen:
                return {"refused": f"{self.policy} has been taken"}
            self.changes = {change: self.policy}
            self.policy = name
        return {**told, "captures_graphs": self.captures, "routes": []}

    def flexquant_restore_policy(self, change: str) -> dict[str, Any]:
        if self.cannot_go_back:
            return {"refused": "no memory"}
        self.policy = self.changes.pop(change, self.policy)
        return {}


def described(name: str) -> dict[str, str]:
    return {"name": name, "digest": name}


class EnginesClient:
    """Stands in for vLLM's client of several engines, as far as they are asked by name."""

    def __init__(self, engines: list[Engine]) -> None:
        self.core_engines = engines
        self.engine_core = self
        self.paused = False
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(quantization=QUANT_METHOD),
            parallel_config=SimpleNamespace(worker_extension_cls=WORKER_EXTENSION),
        )

    async def _call_utility_async(
        self, _: str, method: str, timeout: None, args: tuple[Any, ...], kwargs: None, *, engine: Engine
    ) -> list[Any]:
        assert timeout is None, "vLLM would give an answer that comes later to the next question"
        async with engine.is_asked:
            if method == "flexquant_change_policy" and args[2] is False:
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


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    monkeypatch.setenv(ADMIN_KEY, ADMIN)
    app = FastAPI()
    FlexQuantEndpoints().attach_router(app)
    app.state.args = Namespace(api_key=KEYS)
    return app


@pytest.fixture
def post(app: FastAPI) -> Iterator[Post]:
    """Yield a function that posts a policy called ``mine`` to these engines and returns code and answer."""
    with TestClient(app, raise_server_exceptions=False) as client:

        def ask(*engines: Engine) -> tuple[int, Any]:
            app.state.flexquant_engine = EnginesClient([*engines])
            headers = {"Authorization": f"Bearer {ADMIN}"}
            reply = client.post("/flexquant/policy?name=mine", content=POLICY, headers=headers)
            return reply.status_code, reply.json() if reply.status_code < 500 else None

        yield ask


@asynccontextmanager
async def posting(app: FastAPI) -> AsyncIterator[asyncio.Task[httpx.Response]]:
    """Post a policy, called ``mine``, beside what the test does; the reply is the task's."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        headers = {"Authorization": f"Bearer {ADMIN}"}
        yield asyncio.create_task(client.post("/flexquant/policy?name=mine", content=POLICY, headers=headers))


def test_all_engines_take_it(post: Post) -> None:
    engines = [Engine(), Engine()]
    engines[1].policy = "another"
    code, told = post(*engines)
    assert (code, told["before"]["name"], told["after"]["name"]) == (200, "before", "mine")
    assert [engine.policy for engine in engines] == ["mine", "mine"]


def test_an_engine_that_has_taken_another_meanwhile_keeps_it_and_the_others_go_back(post: Post) -> None:
    engines = [Engine(), Engine(lambda: setattr(engines[1], "policy", "theirs"))]
    code, told = post(*engines)
    assert (code, told["detail"]) == (409, "theirs has been taken")
    assert [engine.policy for engine in engines] == ["before", "theirs"]


def test_an_engine_that_goes_on_to_another_is_left_alone(post: Post) -> None:
    def theirs_everywhere() -> None:
        for engine in engines:
            engine.policy, engine.changes = "theirs", {"their change": "mine"}

    engines = [Engine(), Engine(theirs_everywhere)]
    assert post(*engines)[0] == 409
    assert [engine.policy for engine in engines] == ["theirs", "theirs"]


def test_an_engine_that_fails_takes_the_policy_from_the_others(post: Post) -> None:
    def fail() -> None:
        raise RuntimeError("an engine that does not answer")

    engines = [Engine(), Engine(fail), Engine()]
    assert post(*engines)[0] == 500
    assert [engine.policy for engine in engines] == ["before"] * 3


def test_engines_that_cannot_go_back_are_told_of_beside_the_reason(post: Post) -> None:
    engines = [Engine(), Engine(lambda: setattr(engines[1], "policy", "theirs"))]
    engines[0].cannot_go_back = True
    code, told = post(*engines)
    reason = "theirs has been taken; and engines could not go back (no memory)"
    assert (code, told["detail"]) == (409, f"{reason}: GET /flexquant tells their policies")


@pytest.mark.parametrize("captures", [False, True])
def test_a_change_that_takes_long_goes_on_and_no_engine_goes_back(
    captures: bool, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(policy_endpoint, "CAPTURE_TIMEOUT", 0.01)
        slow, fast = engines = [Engine(), Engine()]
        slow.captures = captures
        slow.may_change.clear()
        app.state.flexquant_engine = EnginesClient(engines)
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


def test_a_change_whose_sender_is_cancelled_is_undone(app: FastAPI) -> None:
    async def scenario() -> None:
        slow, fast = engines = [Engine(), Engine()]
        slow.may_change.clear()
        app.state.flexquant_engine = EnginesClient(engines)
        async with posting(app) as answer:
            while fast.policy != "mine":
                await asyncio.sleep(0)
            answer.cancel()
            await asyncio.sleep(0)
            slow.may_change.set()
            with pytest.raises(asyncio.CancelledError):
                await answer
        assert [slow.policy, fast.policy] == ["before", "before"]
        assert slow.changes == {}, "it has taken the policy before it went back"

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_the_status_says_where_engines_disagree() -> None:
    one, other = (
        {"policy": described(name), "counted": [{"plan": "p", "phase": "decode", "forward": 2}]}
        for name in ("one", "other")
    )
    assert sum_up([one, one]) == {
        "policy": described("one"),
        "counted": [{"plan": "p", "phase": "decode", "forward": 4}],
        "ranks": 2,
    }
    assert sum_up([one, other, one])["disagreement"] == [described("one"), described("other")]


@pytest.mark.parametrize(("key", "code"), [(KEYS[0], 404), (KEYS[1], 404), (KEYS[0] + KEYS[1], 401)])
def test_every_key_of_vllms_is_taken(app: FastAPI, key: str, code: int) -> None:
    """With a key of vLLM's the answer is that nothing merged is served."""
    app.state.flexquant_engine = EnginesClient([])
    app.state.flexquant_engine.vllm_config.model_config.quantization = None
    with TestClient(app) as client:
        assert client.get("/flexquant", headers={"Authorization": f"Bearer {key}"}).status_code == code


@pytest.mark.parametrize("key", [ADMIN, f"{ADMIN}\n", f" {ADMIN}\t"])
def test_space_around_the_administrators_key_is_none_of_it(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_KEY, key)
    app = FastAPI()
    FlexQuantEndpoints().attach_router(app)
    app.state.flexquant_engine = EnginesClient([Engine()])
    with TestClient(app) as client:
        headers = {"Authorization": f"Bearer {ADMIN}"}
        assert client.post("/flexquant/policy", content=POLICY, headers=headers).status_code == 200
