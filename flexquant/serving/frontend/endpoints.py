# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Add FlexQuant's routes to vLLM's API server: its status, and, with an administrator's key, policy changes.

``GET /flexquant`` returns policy, routes, kernels and counters, ``GET /flexquant/ui`` shows them as a page,
and ``GET /metrics`` shows the counters beside vLLM's. ``POST /flexquant/policy`` changes the policy, and
exists only if the operator has set a key. vLLM adds a plugin's routes only with ``VLLM_PLUGINS=flexquant``.

A policy changes between two steps of the engine. This process resolves it to its route table. All ranks are
first asked whether they can take it, and compare it with what they have loaded. vLLM runs such a question in
the loop of its engine, where no step is running, and passes questions and steps to the ranks in the same
order. So all ranks change between the same two steps, without an effect on requests. If CUDA graphs have to
be captured, vLLM's own pause holds all requests meanwhile.

Each engine takes the policy only if it still has a policy that the first question saw. So if two API servers
change the policy at once, one of them is refused, or both. If an engine refuses or does not answer after
others have taken the policy, they differ: the answer says so, and ``GET /flexquant`` lists their policies.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import secrets
import time
from argparse import Namespace
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from itertools import chain
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.datastructures import State
from fastapi.responses import HTMLResponse
from vllm.config import VllmConfig
from vllm.logger import init_logger

from flexquant.checkpoint.model_config import JsonObject
from flexquant.errors import FlexQuantError
from flexquant.policy.routes import RouteChange
from flexquant.policy.rules import Policy, parse_policy_text
from flexquant.policy.schema import SCHEMA, Phase, json_schema
from flexquant.serving.config import ServedPolicy, merged_of, served_policy
from flexquant.serving.frontend import access
from flexquant.serving.frontend.client import admin_key
from flexquant.serving.frontend.metrics import WorkerMetrics, add_metrics_route

if TYPE_CHECKING:
    from flexquant.serving.vllm_api import AsyncLLM

logger = init_logger("vllm.flexquant.policy")

MAX_BYTES = 1 << 17
"""Largest size of a posted policy, 30 times a tuned one; the worst of that size take seconds to read."""
CAPTURE_TIMEOUT = 1800.0
"""Largest number of seconds for a change that captures CUDA graphs."""
LATE = f"The workers did not answer within {access.STATUS_TIMEOUT:.0f} s."

_one_at_a_time = asyncio.Lock()


class FlexQuantEndpoints:
    """Implements vLLM's ``vllm.endpoint_plugins`` entry point."""

    name = "flexquant"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; vLLM calls this when it builds the server."""
        app.add_api_route(
            "/flexquant",
            status,
            methods=["GET"],
            dependencies=[Depends(access.authorise)],
            response_model=Status,
            response_model_exclude_unset=True,
            responses=access.refusal_responses(
                _401="Not vLLM's key.", _404="No merged checkpoint is served.", _504=LATE
            ),
        )
        app.add_api_route("/flexquant/ui", page, methods=["GET"], response_class=HTMLResponse)
        add_metrics_route(app)
        if admin_key():
            add_policy_route(app)

    async def init_state(self, engine_client: AsyncLLM, state: State, args: Namespace) -> None:
        """Keep vLLM's client of the engine, which the routes ask; vLLM calls this once the client exists."""
        state.flexquant_engine = engine_client
        state.flexquant_metrics = WorkerMetrics(engine_client)


def add_policy_route(app: FastAPI) -> None:
    document = json_schema() | {"examples": [{"schema": SCHEMA, "rules": [{"use": "w8a8"}]}]}
    content = {kind: {"schema": document} for kind in ("application/json", "application/yaml")}
    app.add_api_route(
        "/flexquant/policy",
        change_policy,
        methods=["POST"],
        dependencies=[Depends(access.authorise_admin)],
        response_model=PolicyChange,
        response_model_exclude_unset=True,
        responses=access.refusal_responses(
            _400="A parameter of the query is wrong.",
            _401="Not the administrator's key.",
            _404="No merged checkpoint is served.",
            _409="The server cannot take this policy.",
            _413=f"The body has more than {MAX_BYTES} bytes.",
            _422="The body is no policy, or the name is not printable.",
            _504="The engines take long; what they were asked is still under way.",
        ),
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )


class RouteOfTokens(access.Reply):
    """The plan of the passes of ``min_tokens`` to ``max_tokens`` tokens, ends included."""

    min_tokens: int
    max_tokens: int
    plan: str


class Status(access.Reply):
    """What the first rank serves, and the counters of all engines."""

    flexquant: str
    architecture: str
    policy: access.PolicyName
    plans: dict[str, list[str]]
    """Plan -> variant of each layer."""
    routes: dict[Phase, list[RouteOfTokens]]
    kernels: dict[str, list[str]]
    """Variant -> names of its kernels."""
    weight_bytes: dict[str, int]
    """Variant, or ``shared`` for weights that several variants use -> bytes of its weights."""
    weight_bytes_by_layers: dict[str, dict[str, int]]
    """The same bytes by range of decoder layers, e.g. ``0-3``; an empty text is outside of layers."""
    last_pass: JsonObject | None
    """Phase, tokens with and without padding, sequences and plan, as in the trace; None before any pass."""
    counted: list[JsonObject] | None
    """Plan, phase, and their counters by the names in ``/metrics`` without ``flexquant:``."""
    ranks: int
    disagreement: list[access.PolicyName] | None = None
    """Policies of all engines, only if they differ."""


async def status(request: Request) -> JsonObject:
    """Return the first rank's status, counters summed over engines; raise HTTPException 404 or 504."""
    try:
        engine, timeout = access.merged_engine(request), access.STATUS_TIMEOUT
        return sum_up(await access.ask_workers(engine, "flexquant_status", timeout=timeout))
    except TimeoutError as e:
        raise HTTPException(504, f"{LATE} A long step may be under way; ask again.") from e


def sum_up(ranks: list[JsonObject]) -> JsonObject:
    """Combine the statuses of all ranks into one."""
    counted = [rank["counted"] for rank in ranks if rank["counted"] is not None]
    policies = [*{rank["policy"]["digest"]: rank["policy"] for rank in ranks}.values()]
    summed = {**ranks[0], "counted": add_up(counted) if counted else None, "ranks": len(ranks)}
    return summed | ({"disagreement": policies} if len(policies) > 1 else {})


def add_up(counted: Iterable[list[JsonObject]]) -> list[JsonObject]:
    """Add the counters of several engines, by plan and phase."""
    cells: dict[tuple[str, str], Counter[str]] = {}
    for cell in chain.from_iterable(counted):
        numbers = {name: value for name, value in cell.items() if name not in ("plan", "phase")}
        cells.setdefault((cell["plan"], cell["phase"]), Counter()).update(numbers)
    return [{"plan": plan, "phase": phase, **sums} for (plan, phase), sums in cells.items()]


async def page() -> HTMLResponse:
    """Return the page for people; it holds no data, and fetches the status with a key."""
    nonce = secrets.token_urlsafe(16)
    html = importlib.resources.files(__package__).joinpath("status_page.html").read_text("utf-8")
    policy = f"default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'"
    headers = {
        "Content-Security-Policy": f"{policy}; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
    }
    return HTMLResponse(html.replace("NONCE", nonce, 1), headers=headers)


class PolicyChange(access.Reply):
    """Effects of changing the policy, or of a dry run."""

    before: access.PolicyName
    after: access.PolicyName
    captures_graphs: bool
    routes: list[RouteChange]
    dry_run: bool
    seconds: float


async def change_policy(
    request: Request,
    name: Annotated[str, Query(min_length=1, max_length=200)] = "posted policy",
    dry_run: bool = False,
) -> JsonObject:
    """Change the server's policy to that in the body, YAML or JSON, and return what changes.

    ``name`` becomes the policy's name, and ``dry_run`` only asks what would change. Raises HTTPException 413
    for a body of more than 128 KiB, 422 for a body that is no policy, and 409 for a policy that this server
    cannot take, each with the reason; nothing changes then, except on engines that the reason speaks of. It
    raises 504 if the engines do not finish in time.
    """
    body = await read_body(request)  # outside of the lock: a body may never come to its end
    async with _one_at_a_time:
        policy = await asyncio.to_thread(read_policy, body, name)
        began = time.perf_counter()
        engine = access.merged_engine(request)
        served = await asyncio.to_thread(resolve, engine.vllm_config, policy)
        try:
            ranks = await _ask_change(engine, served, True)
            if not dry_run:
                captures = any(rank["captures_graphs"] for rank in ranks)
                seen = [rank["before"]["digest"] for rank in ranks]
                pause: AbstractAsyncContextManager[None] = _paused(engine) if captures else nullcontext()
                async with pause:
                    ranks = await _ask_change(engine, served, False, seen)
                logger.info("policy %s taken instead of %s", name, ranks[0]["before"]["name"])
        except TimeoutError as e:
            under_way = f"{e}; it is still under way: GET /flexquant tells the policy that is served"
            raise HTTPException(504, under_way) from e
        return {**ranks[0], "dry_run": dry_run, "seconds": time.perf_counter() - began}


async def read_body(request: Request) -> bytes:
    """Return the body; raise HTTPException 413 as soon as it is too large."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BYTES:
            raise HTTPException(413, f"a policy of more than {MAX_BYTES} bytes; give one that is smaller")
    return bytes(body)


@contextmanager
def _refusing(status: int) -> Iterator[None]:
    try:
        yield
    except FlexQuantError as e:
        raise HTTPException(status, str(e)) from e


@_refusing(422)
def read_policy(body: bytes, name: str) -> Policy:
    """Return the policy in a body; raise HTTPException 422 if there is none."""
    if not name.isprintable():
        raise FlexQuantError(f"the name {name!r} is not printable; give another one")
    return parse_policy_text(body, name, name)


@_refusing(409)
def resolve(vllm_config: VllmConfig, policy: Policy) -> ServedPolicy:
    """Return the policy as workers take it; raise HTTPException 409 if this server cannot serve it."""
    return served_policy(vllm_config, merged_of(vllm_config.model_config), policy)


async def _ask_change(
    engine: AsyncLLM, served: ServedPolicy, dry_run: bool, seen: list[str] | None = None
) -> list[JsonObject]:
    """Return the answers of all ranks; raise HTTPException 409 with the reason if one refuses."""
    timeout = access.STATUS_TIMEOUT if dry_run else CAPTURE_TIMEOUT
    method = "flexquant_change_policy"
    ranks = await access.ask_workers(engine, method, served.to_json(), dry_run, seen, timeout=timeout)
    refused = [rank["refused"] for rank in ranks if "refused" in rank]
    if refused and not dry_run and len(refused) < len(ranks):
        advice = "GET /flexquant tells their policies; apply one policy to all again"
        raise HTTPException(409, f"{refused[0]}; other engines have taken {served.name}: {advice}")
    if refused:
        raise HTTPException(409, refused[0])
    return ranks


@asynccontextmanager
async def _paused(engine: AsyncLLM) -> AsyncIterator[None]:
    """Pause requests, without dropping them, in the block; an operator's own pause stays."""
    was_paused = await engine.is_paused()
    timeout = None
    try:
        if not was_paused:
            await engine.pause_generation(mode="keep", clear_cache=False)
        yield
    except TimeoutError:
        timeout = 0.0  # engines resume once they have done what was asked before
        raise
    finally:
        if not was_paused:
            with suppress(TimeoutError):
                await access.answer_of(engine.resume_generation(), timeout)
