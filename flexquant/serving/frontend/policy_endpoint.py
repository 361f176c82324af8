# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Serve ``POST /flexquant/policy``, which changes a server's policy between two steps of its engine.

The body is a policy document, YAML or JSON. In the query, ``name`` becomes the policy's name, and ``dry_run``
only asks what would change. All ranks are first asked whether they can take the policy. vLLM runs such a
question in the loop of its engine, where no step is running, and passes questions and steps to the ranks in
the same order. So all ranks change between the same two steps, without an effect on requests. If CUDA graphs
have to be captured, vLLM's own pause holds all requests meanwhile.

Each engine takes the policy only if it still has a policy that the first question saw. So if two API servers
change the policy at once, one of them is refused, or both. If an engine refuses, the engines that have taken
the policy go back. An engine that does not answer in time is not asked to go back, as it may be taking the
policy.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, FastAPI, HTTPException, Query, Request
from vllm.logger import init_logger

from flexquant.checkpoint.model_config import JsonObject
from flexquant.errors import FlexQuantError
from flexquant.policy.rules import Policy, parse_policy_text
from flexquant.policy.schema import SCHEMA, inlined_json_schema
from flexquant.serving.frontend.access import STATUS_TIMEOUT, answer_of, ask_ranks, authorise_admin
from flexquant.serving.frontend.answers import PolicyChange, refusal_responses

if TYPE_CHECKING:
    from flexquant.serving.vllm_api import AsyncLLM

logger = init_logger("vllm.flexquant.policy")

MAX_BYTES = 1 << 17
"""Largest size of a posted policy, 30 times a tuned one; the worst of that size take seconds to read."""
CAPTURE_TIMEOUT = 1800.0
"""Largest number of seconds for a change that captures CUDA graphs."""

REFUSALS = refusal_responses(
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
) -> JsonObject:
    """Change the server's policy to that in the body, and return what changes.

    Raises HTTPException 413 for a body of more than 128 KiB, 422 for a body that is no policy, and 409 for a
    policy that this server cannot take, each with the reason; nothing changes then. Raises HTTPException 504
    if the engines do not finish in time. A thread parses the body, so the server's loop does not wait.
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
    """Return the policy in a body; raise HTTPException 422 if there is none."""
    try:
        if not name.isprintable():
            raise FlexQuantError(f"the name {name!r} is not printable; give another one")
        return parse_policy_text(body, name, name)
    except FlexQuantError as e:
        raise HTTPException(422, str(e)) from e


async def read_body(request: Request) -> bytes:
    """Return the body; raise HTTPException 413 as soon as it is too large."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BYTES:
            raise HTTPException(413, f"a policy of more than {MAX_BYTES} bytes; give one that is smaller")
    return bytes(body)


async def _change(request: Request, policy: Policy, seen: list[str]) -> list[JsonObject]:
    """Have all engines, or none, replace a policy that has one of the digests ``seen``."""
    change = uuid.uuid4().hex
    try:
        return await _ask_change(request, policy, False, seen, change)
    except TimeoutError:
        raise
    except BaseException as e:
        await asyncio.shield(_go_back(request, change, e))
        raise


async def _go_back(request: Request, change: str, why: BaseException) -> None:
    """Have the engines undo a change, including engines that are still making it.

    Raises HTTPException, with both reasons, if an engine cannot.
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


async def _ask_change(request: Request, policy: Policy, dry_run: bool, *more: object) -> list[JsonObject]:
    document = {key: value for key, value in policy.document.items() if key != "measured"}
    timeout = STATUS_TIMEOUT if dry_run else CAPTURE_TIMEOUT
    method = "flexquant_change_policy"
    return await _ask_all(request, timeout, method, policy.name, document, dry_run, *more)


async def _ask_all(request: Request, timeout: float, method: str, *args: object) -> list[JsonObject]:
    """Return the answers of all ranks; raise HTTPException 409 with the reason if one refuses."""
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
    """Pause requests, without dropping them, in the block; an operator's own pause stays."""
    engine: AsyncLLM = request.app.state.flexquant_engine
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
                await answer_of(engine.resume_generation(), timeout)
