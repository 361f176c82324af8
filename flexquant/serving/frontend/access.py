# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Who may use the routes, and how they ask the workers."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, HTTPException, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from flexquant.serving.frontend.client import ADMIN_KEY, admin_key
from flexquant.serving.frontend.engine_client import ask_workers, serves_merged

if TYPE_CHECKING:
    from flexquant.serving.vllm_api import AsyncLLM

STATUS_TIMEOUT = 60.0
"""Largest number of seconds for the workers' answer; they first finish the step that they are in."""
LATE = f"The workers did not answer within {STATUS_TIMEOUT:.0f} s."

VLLM_KEY = HTTPBearer(
    auto_error=False, scheme_name="vLLM's key", description="`--api-key`, where the server has one."
)
ADMINISTRATORS_KEY = HTTPBearer(
    auto_error=False,
    scheme_name="administrator's key",
    description=f"{ADMIN_KEY} of the server's environment.",
)
Given = HTTPAuthorizationCredentials | None


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


async def ask_ranks(request: Request, method: str, *args: Any, timeout: float) -> list[Any]:
    """Return the answers of all workers (:func:`ask_workers`).

    Raises HTTPException 404 if no merged checkpoint is served, or if the workers have another extension.
    """
    engine: AsyncLLM = request.app.state.flexquant_engine
    if not serves_merged(engine):
        extension = engine.vllm_config.parallel_config.worker_extension_cls
        raise HTTPException(
            404, f"no merged checkpoint is served, or its workers' extension is '{extension}'"
        )
    return await ask_workers(engine, method, *args, timeout=timeout)


async def ask_briefly(request: Request, method: str, *args: Any) -> list[Any]:
    """Return the answers of all workers; raise HTTPException 504 if they take longer than they may."""
    try:
        return await ask_ranks(request, method, *args, timeout=STATUS_TIMEOUT)
    except TimeoutError as e:
        raise HTTPException(504, f"{LATE} A long step may be under way; ask again.") from e
