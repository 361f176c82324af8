# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Serve ``POST /flexquant/policy``, which changes a server's policy between two steps of its engine.

The body is a policy document, YAML or JSON. In the query, ``name`` becomes the policy's name, and ``dry_run``
only asks what would change. This process resolves the policy to its route table, which the ranks compare with
what they have loaded; all are first asked whether they can take it. vLLM runs such a
question in the loop of its engine, where no step is running, and passes questions and steps to the ranks in
the same order. So all ranks change between the same two steps, without an effect on requests. If CUDA graphs
have to be captured, vLLM's own pause holds all requests meanwhile.

Each engine takes the policy only if it still has a policy that the first question saw. So if two API servers
change the policy at once, one of them is refused, or both. If an engine refuses or does not answer after
others have taken the policy, they differ: the answer says so, and ``GET /flexquant`` lists their policies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, FastAPI, HTTPException, Query, Request
from vllm.logger import init_logger

from flexquant.checkpoint.merged_config import MergedConfig
from flexquant.checkpoint.model_config import JsonObject
from flexquant.errors import FlexQuantError
from flexquant.policy.rules import Policy, parse_policy_text
from flexquant.policy.schema import SCHEMA, json_schema
from flexquant.serving.config import served_policy
from flexquant.serving.frontend.access import (
    STATUS_TIMEOUT,
    answer_of,
    ask_ranks,
    authorise_admin,
    merged_engine,
)
from flexquant.serving.frontend.answers import PolicyChange, refusal_responses

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from flexquant.serving.options import ServedPolicy
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
DOCUMENT = json_schema() | {"examples": [{"schema": SCHEMA, "rules": [{"use": "w8a8"}]}]}

DISAGREE = "GET /flexquant tells their policies; apply one policy to all again"

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
    policy that this server cannot take, each with the reason; nothing changes then, except on engines that
    the reason speaks of. Raises HTTPException 504 if the engines do not finish in time. Threads parse and
    resolve the policy, so the server's loop does not wait.
    """
    body = await read_body(request)
    async with _one_at_a_time:
        policy = await asyncio.to_thread(read_policy, body, name)
        began = time.perf_counter()
        served = await asyncio.to_thread(resolve, merged_engine(request).vllm_config, policy)
        try:
            ranks = await _ask_change(request, served, True)
            if not dry_run:
                captures = any(rank["captures_graphs"] for rank in ranks)
                seen = [rank["before"]["digest"] for rank in ranks]
                async with _paused(request) if captures else _running():
                    ranks = await _ask_change(request, served, False, seen)
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


def resolve(vllm_config: VllmConfig, policy: Policy) -> ServedPolicy:
    """Return the policy as workers take it; raise HTTPException 409 if this server cannot serve it."""
    try:
        merged = MergedConfig.from_json(vllm_config.model_config.hf_config.quantization_config)
        return served_policy(vllm_config, merged, policy.name, policy)
    except FlexQuantError as e:
        raise HTTPException(409, str(e)) from e


async def _ask_change(
    request: Request, served: ServedPolicy, dry_run: bool, seen: list[str] | None = None
) -> list[JsonObject]:
    """Return the answers of all ranks; raise HTTPException 409 with the reason if one refuses."""
    timeout = STATUS_TIMEOUT if dry_run else CAPTURE_TIMEOUT
    method = "flexquant_change_policy"
    ranks = await ask_ranks(request, method, served.to_json(), dry_run, seen, timeout=timeout)
    refused = [rank["refused"] for rank in ranks if "refused" in rank]
    if refused and not dry_run and len(refused) < len(ranks):
        raise HTTPException(409, f"{refused[0]}; other engines have taken {served.name}: {DISAGREE}")
    if refused:
        raise HTTPException(409, refused[0])
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
