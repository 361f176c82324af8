# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What all routes need: who may use them, how they ask the workers of all engines, how they refuse."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import secrets
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import Depends, HTTPException, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict

from flexquant.checkpoint.merged_config import QUANT_METHOD
from flexquant.checkpoint.model_config import JsonObject
from flexquant.serving.frontend.client import ADMIN_KEY, admin_key
from flexquant.serving.registration import WORKER_EXTENSION

if TYPE_CHECKING:
    from flexquant.serving.vllm_api import AsyncLLM, AsyncMPClient

STATUS_TIMEOUT = 60.0
"""Largest number of seconds for the workers' answer; they first finish the step that they are in."""

VLLM_KEY = HTTPBearer(
    auto_error=False, scheme_name="vLLM's key", description="`--api-key`, where the server has one."
)
ADMINISTRATORS_KEY = HTTPBearer(
    auto_error=False,
    scheme_name="administrator's key",
    description=f"{ADMIN_KEY} of the server's environment.",
)
Given = HTTPAuthorizationCredentials | None
Answer = TypeVar("Answer")
Answers = list[Any]
"""The answers of all workers, in the form in which the method that they were asked to call answers."""


def authorise(request: Request, given: Annotated[Given, Depends(VLLM_KEY)]) -> None:
    """Require vLLM's ``--api-key``, if there is one, as vLLM does on ``/v1``; raise HTTPException 401."""
    keys = [key for key in (request.app.state.args.api_key or [os.environ.get("VLLM_API_KEY")]) if key]
    if keys:
        _require(given, keys)


def authorise_admin(given: Annotated[Given, Depends(ADMINISTRATORS_KEY)]) -> None:
    """Require the administrator's key; raise HTTPException 401 without it."""
    _require(given, [admin_key()])


def _require(given: Given, keys: list[str]) -> None:
    token = given.credentials.encode() if given else b""
    matches = [secrets.compare_digest(token, key.encode()) for key in keys]
    if not any(matches):
        raise HTTPException(401, "Unauthorized")


def serves_merged(engine: AsyncLLM) -> bool:
    """Whether the engine of vLLM's client ``engine`` serves a merged checkpoint with FlexQuant's workers."""
    config = engine.vllm_config
    is_merged = config.model_config.quantization == QUANT_METHOD
    return is_merged and config.parallel_config.worker_extension_cls == WORKER_EXTENSION


def merged_engine(request: Request) -> AsyncLLM:
    """Return vLLM's client of the engine; raise HTTPException 404 without FlexQuant's model or workers."""
    engine: AsyncLLM = request.app.state.flexquant_engine
    if not serves_merged(engine):
        problem = "no merged checkpoint is served, or its workers' extension is"
        raise HTTPException(404, f"{problem} '{engine.vllm_config.parallel_config.worker_extension_cls}'")
    return engine


async def ask_workers(engine: AsyncLLM, method: str, *args: object, timeout: float | None) -> Answers:
    """Call a method of FlexQuant's worker extension on every rank, between two steps; return all answers.

    Raises TimeoutError after ``timeout`` seconds (None: no limit); the engines still answer, in order.
    """
    # AsyncLLM.collective_rpc also asks all engines, but returns only the first one's answers. The engines get
    # no timeout: after one, vLLM's executor would take the late answer for the answer to its next question.
    client: AsyncMPClient = engine.engine_core
    ask = functools.partial(client._call_utility_async, "collective_rpc", method, None, args, None)
    questions = [ask(engine=core) for core in client.core_engines]
    ranks: list[Answers] = await answer_of(asyncio.gather(*questions), timeout)
    return [*itertools.chain.from_iterable(ranks)]


async def answer_of(question: Awaitable[Answer], timeout: float | None) -> Answer:
    """Return a question's answer, or raise TimeoutError after ``timeout`` s; the question continues."""
    asked = asyncio.ensure_future(question)
    await asyncio.wait({asked}, timeout=timeout)
    if not asked.done():
        raise TimeoutError(f"no answer within {timeout} s")
    return asked.result()


class Reply(BaseModel):
    """An answer with exactly the declared keys, for validation and for the server's OpenAPI schema."""

    model_config = ConfigDict(extra="forbid")


class PolicyName(Reply):
    name: str
    digest: str
    """SHA-256 of the policy's document without its measured times."""


class Reason(Reply):
    message: str
    type: str
    param: str | None
    code: int


class Refusal(Reply):
    """Body of an HTTPException in vLLM's server."""

    error: Reason


def refusal_responses(**reasons: str) -> dict[int | str, JsonObject]:
    """Return OpenAPI responses for statuses, each given as ``_401="why"``.

    Without 422 or ``_4XX``, FastAPI adds a 422 for wrong parameters, to which vLLM answers 400.
    """
    return {status[1:]: {"model": Refusal, "description": why} for status, why in reasons.items()}
