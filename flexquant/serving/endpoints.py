# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""FlexQuant's routes on vLLM's API server: what is served, and, with an administrator's key, another policy.

``GET /flexquant`` tells policy, routes, kernels and counters, and ``GET /flexquant/ui`` is a page of these.
``POST /flexquant/policy`` takes another policy, and exists only where the operator has set its key. vLLM
adds routes of plugins only where the operator names the plugin: ``VLLM_PLUGINS=flexquant``.
"""

from __future__ import annotations

import importlib.resources
import itertools
import os
import secrets
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from flexquant.serving.answers import ServedRequests, Status, refusals
from flexquant.serving.client import ADMIN_KEY, admin_key
from flexquant.serving.engine_client import ask_workers, serves_merged

if TYPE_CHECKING:
    from argparse import Namespace

STATUS_TIMEOUT = 60.0
"""Seconds for the workers' answer, for which they finish the step that they are in."""

VLLM_KEY = HTTPBearer(
    auto_error=False, scheme_name="vLLM's key", description="`--api-key`, where the server has one."
)
ADMINISTRATORS_KEY = HTTPBearer(
    auto_error=False,
    scheme_name="administrator's key",
    description=f"{ADMIN_KEY} of the server's environment.",
)
Given = HTTPAuthorizationCredentials | None


class FlexQuantEndpoints:
    """vLLM's ``vllm.endpoint_plugins`` entry point."""

    name = "flexquant"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; vLLM calls this when it builds the server."""
        with_key: dict[str, Any] = {"methods": ["GET"], "dependencies": [Depends(authorise)]}
        nothing = "No merged checkpoint is served."
        app.add_api_route(
            "/flexquant",
            status,
            response_model=Status,
            response_model_exclude_unset=True,
            responses=refusals(_401="Not vLLM's key.", _404=nothing),
            **with_key,
        )
        app.add_api_route("/flexquant/ui", page, methods=["GET"], response_class=HTMLResponse)
        app.add_api_route(
            "/flexquant/requests/{response}",
            plans_of_response,
            response_model=ServedRequests,
            response_model_exclude_unset=True,
            responses=refusals(_401="Not vLLM's key.", _404="None of the last requests.", _4XX="Refused."),
            **with_key,
        )
        if admin_key():
            from flexquant.serving.policy_endpoint import add_policy_route

            add_policy_route(app)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Keep vLLM's client of the engine, which the routes ask; vLLM calls this when it is there."""
        from flexquant.serving.options import ServingOptions

        state.flexquant_engine = engine_client
        if serves_merged(engine_client) and ServingOptions.from_vllm(engine_client.vllm_config).requests:
            await engine_client.collective_rpc("flexquant_follow_requests")
            if await engine_client.is_tracing_enabled():
                from flexquant.serving.request_spans import follow_spans

                state.flexquant_spans = follow_spans(engine_client)


def authorise(request: Request, given: Annotated[Given, Depends(VLLM_KEY)]) -> None:
    """Ask for vLLM's ``--api-key``, if there is one, as vLLM does on ``/v1``; raises HTTPException 401."""
    keys = [key for key in (request.app.state.args.api_key or [os.environ.get("VLLM_API_KEY")]) if key]
    if keys:
        _require(given, keys)


def authorise_admin(given: Annotated[Given, Depends(ADMINISTRATORS_KEY)]) -> None:
    """Ask for the administrator's key; raises HTTPException 401."""
    _require(given, [admin_key()])


def _require(given: Given, keys: list[str]) -> None:
    token = given.credentials.encode() if given else b""
    matches = [secrets.compare_digest(token, key.encode()) for key in keys]
    if not any(matches):
        raise HTTPException(401, "Unauthorized")


async def status(request: Request) -> dict[str, Any]:
    """Return the first rank's status with the counters of all engines in sum, and policies that differ.

    Raises HTTPException 404 where no merged checkpoint is served.
    """
    return sum_up(await ask_ranks(request, "flexquant_status", timeout=STATUS_TIMEOUT))


def sum_up(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one status of those of all ranks."""
    counted = [rank["counted"] for rank in ranks if rank["counted"] is not None]
    policies = [*{rank["policy"]["digest"]: rank["policy"] for rank in ranks}.values()]
    summed = {**ranks[0], "counted": add_up(counted) if counted else None, "ranks": len(ranks)}
    return summed | ({"disagreement": policies} if len(policies) > 1 else {})


def add_up(counted: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Add the counters of several engines, by plan and phase."""
    cells: dict[tuple[str, str], Counter[str]] = {}
    for cell in itertools.chain.from_iterable(counted):
        where = cell["plan"], cell["phase"]
        cells.setdefault(where, Counter()).update(
            {name: value for name, value in cell.items() if name not in ("plan", "phase")}
        )
    return [{"plan": plan, "phase": phase, **sums} for (plan, phase), sums in cells.items()]


async def plans_of_response(request: Request, response: str) -> dict[str, Any]:
    """Return which plans computed the tokens of a response, given by its ``id``.

    One response may answer several prompts, or one prompt several times: each is a request. Raises
    HTTPException 404 where none is among the last, or requests are not followed.
    """
    ranks = await ask_ranks(request, "flexquant_requests", response, timeout=STATUS_TIMEOUT)
    found = {record["request"]: record for record in itertools.chain.from_iterable(ranks)}
    if not found:
        raise HTTPException(
            404,
            f"no request of {response} among the last; give the id of a response, of a server that follows "
            "requests (additional-config 'flexquant.requests': true)",
        )
    return {"requests": list(found.values())}


async def page() -> HTMLResponse:
    """Return the page for people, which holds nothing of the server: it asks for the status, with a key."""
    nonce = secrets.token_urlsafe(16)
    html = importlib.resources.files("flexquant.serving").joinpath("status_page.html").read_text("utf-8")
    policy = f"default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'"
    headers = {
        "Content-Security-Policy": f"{policy}; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
    }
    return HTMLResponse(html.replace("NONCE", nonce, 1), headers=headers)


async def ask_ranks(request: Request, method: str, *args: Any, timeout: float) -> list[Any]:
    """Return what all workers answer (:func:`ask_workers`).

    Raises HTTPException 404 where no merged checkpoint is served, or by workers with another extension.
    """
    engine = request.app.state.flexquant_engine
    if not serves_merged(engine):
        extension = engine.vllm_config.parallel_config.worker_extension_cls
        raise HTTPException(
            404, f"no merged checkpoint is served, or its workers' extension is '{extension}'"
        )
    return await ask_workers(engine, method, *args, timeout=timeout)
