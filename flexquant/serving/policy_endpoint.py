# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""``POST /flexquant/policy``: another policy for a server, between two steps of its engine.

The body is a policy document, YAML or JSON. Of the query, ``name`` is what the policy is called from then
on, and ``dry_run`` asks only what would change. All ranks are asked first whether they can take it. vLLM runs
such a question in the loop of its engine, where no step is under way, and passes it on to the ranks in one
order with the steps: so they all change between the same two steps, and no request notices. Where CUDA graphs
have to be captured, vLLM's own pause holds all requests back meanwhile. Each engine takes the policy only in
the place of one that the first question has seen, so that of two API servers that are asked at once one is
refused, or both; and if an engine refuses, those that have taken the policy go back. An engine that takes too
long is not asked to go back: it may be taking the policy.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Query, Request
from vllm.logger import init_logger

from flexquant.errors import FlexQuantError
from flexquant.policy.rules import Policy, parse_policy_text
from flexquant.policy.schema import SCHEMA, inlined_json_schema
from flexquant.serving.answers import PolicyChange, refusals
from flexquant.serving.endpoints import STATUS_TIMEOUT, ask_ranks, authorise_admin
from flexquant.serving.engine_client import answer_of

logger = init_logger("vllm.flexquant.policy")

MAX_BYTES = 1 << 17
"""Of a posted policy: 30 times a tuned one. Worse ones of that size take seconds to read."""
CAPTURE_TIMEOUT = 1800.0
"""Seconds for a change that captures CUDA graphs."""

REFUSALS = refusals(
    _400="A parameter of the query is wrong.",
    _401="Not the administrator's key.",
    _404="No merged checkpoint is served.",
    _409="The server cannot take this policy.",
    _413=f"The body has more than {MAX_BYTES} bytes.",
    _422="The body is no policy, or the name is not printable.",
    _504="The engines take long; what they were asked is still under way.",
)
DOCUMENT = inlined_json_schema() | {"examples": [{"schema": SCHEMA, "rules": [{"use": "w8a8"}]}]}

_one_at_a_time = asyncio.Lock()


def add_policy_route(app: FastAPI) -> None:
    """Add ``POST /flexquant/policy``."""
    content = {kind: {"schema": DOCUMENT} for kind in ("application/json", "application/yaml")}
    app.add_api_route(
        "/flexquant/policy",
        change_policy,
        methods=["POST"],
        dependencies=[Depends(authorise_admin)],
        response_model=PolicyChange,
        response_model_exclude_unset=True,
        responses=REFUSALS,
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )


async def change_policy(
    request: Request,
    name: Annotated[str, Query(min_length=1, max_length=200)] = "posted policy",
    dry_run: bool = False,
) -> dict[str, Any]:
    """Have the server take the policy in the body, and return what that changes.

    Raises HTTPException 413 for a body of more than 128 KiB, 422 for one that is no policy, and 409 for a
    policy that this server cannot take, each with the reason; nothing is changed then. Raises HTTPException
    504 while the engines are still at it. The body is read as YAML beside the server's loop, which goes on
    meanwhile.
    """
    body = await read_body(request)
    async with _one_at_a_time:
        policy = await asyncio.to_thread(read_policy, body, name)
        began = time.perf_counter()
        try:
            ranks = await _ask_change(request, policy, True)
            if not dry_run:
                captures = any(rank["captures_graphs"] for rank in ranks)
                async with _paused(request) if captures else _running():
                    ranks = await _change(request, policy, [rank["before"]["digest"] for rank in ranks])
                logger.info("policy %s taken instead of %s", name, ranks[0]["before"]["name"])
        except TimeoutError as e:
            under_way = f"{e}; it is still under way: GET /flexquant tells the policy that is served"
            raise HTTPException(504, under_way) from e
        return {**ranks[0], "dry_run": dry_run, "seconds": time.perf_counter() - began}


def read_policy(body: bytes, name: str) -> Policy:
    """Return the policy in a body; raises HTTPException 422 if there is none."""
    try:
        if not name.isprintable():
            raise FlexQuantError(f"the name {name!r} is not printable; give another one")
        return parse_policy_text(body, name, name)
    except FlexQuantError as e:
        raise HTTPException(422, str(e)) from e


async def read_body(request: Request) -> bytes:
    """Return the body; raises HTTPException 413 as soon as it is too large."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BYTES:
            raise HTTPException(413, f"a policy of more than {MAX_BYTES} bytes; give one that is smaller")
    return bytes(body)


async def _change(request: Request, policy: Policy, seen: list[str]) -> list[dict[str, Any]]:
    """Have all engines take a policy in the place of those of these digests, or none."""
    change = uuid.uuid4().hex
    try:
        return await _ask_change(request, policy, False, seen, change)
    except TimeoutError:
        raise
    except BaseException as e:
        await asyncio.shield(_go_back(request, change, e))
        raise


async def _go_back(request: Request, change: str, why: BaseException) -> None:
    """Have the engines that have made a change undo it, also those that are still at it.

    Raises HTTPException, with both reasons, if one cannot.
    """
    try:
        await _ask_all(request, CAPTURE_TIMEOUT, "flexquant_restore_policy", change)
    except Exception as e:
        reasons = f"{_reason(why)}; and engines could not go back ({_reason(e)})"
        told = f"{reasons}: GET /flexquant tells their policies"
        logger.error("%s", told)
        raise HTTPException(why.status_code if isinstance(why, HTTPException) else 500, told) from e


def _reason(e: BaseException) -> str:
    return str(e.detail) if isinstance(e, HTTPException) else f"{type(e).__name__}: {e}"


async def _ask_change(request: Request, policy: Policy, dry_run: bool, *more: Any) -> list[dict[str, Any]]:
    document = {key: value for key, value in policy.document.items() if key != "measured"}
    timeout = STATUS_TIMEOUT if dry_run else CAPTURE_TIMEOUT
    asked = "flexquant_change_policy", policy.name, document, dry_run, *more
    return await _ask_all(request, timeout, *asked)


async def _ask_all(request: Request, timeout: float, method: str, *args: Any) -> list[dict[str, Any]]:
    """Return what all ranks answer; raises HTTPException 409 with the reason of one that refuses."""
    ranks = await ask_ranks(request, method, *args, timeout=timeout)
    for rank in ranks:
        if "refused" in rank:
            raise HTTPException(409, rank["refused"])
    return ranks


@asynccontextmanager
async def _running() -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def _paused(request: Request) -> AsyncIterator[None]:
    """Hold requests back, and keep them; an operator's own pause stays."""
    engine = request.app.state.flexquant_engine
    was_paused = await engine.is_paused()
    timeout = None
    try:
        if not was_paused:
            await engine.pause_generation(mode="keep", clear_cache=False)
        yield
    except TimeoutError:
        timeout = 0.0  # engines resume when they have done what they were asked before
        raise
    finally:
        if not was_paused:
            with suppress(TimeoutError):
                await answer_of(engine.resume_generation(), timeout)
