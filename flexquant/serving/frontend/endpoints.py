# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Add FlexQuant's routes to vLLM's API server: its status, and, with an administrator's key, policy changes.

``GET /flexquant`` returns policy, routes, kernels and counters, and ``GET /flexquant/ui`` shows them as a
page. ``POST /flexquant/policy`` changes the policy, and exists only if the operator has set a key. vLLM adds
a plugin's routes only if the operator names the plugin: ``VLLM_PLUGINS=flexquant``.
"""

from __future__ import annotations

import importlib.resources
import itertools
import secrets
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse

from flexquant.checkpoint.model_config import JsonObject
from flexquant.serving.frontend.access import LATE, ask_briefly, authorise
from flexquant.serving.frontend.answers import Status, refusal_responses
from flexquant.serving.frontend.client import admin_key

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi.datastructures import State

    from flexquant.serving.vllm_api import AsyncLLM


class FlexQuantEndpoints:
    """Implements vLLM's ``vllm.endpoint_plugins`` entry point."""

    name = "flexquant"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; vLLM calls this when it builds the server."""
        key = [Depends(authorise)]
        nothing = "No merged checkpoint is served."
        app.add_api_route(
            "/flexquant",
            status,
            methods=["GET"],
            dependencies=key,
            response_model=Status,
            response_model_exclude_unset=True,
            responses=refusal_responses(_401="Not vLLM's key.", _404=nothing, _504=LATE),
        )
        app.add_api_route("/flexquant/ui", page, methods=["GET"], response_class=HTMLResponse)
        if admin_key():
            from flexquant.serving.frontend.policy_endpoint import add_policy_route

            add_policy_route(app)

    async def init_state(self, engine_client: AsyncLLM, state: State, args: Namespace) -> None:
        """Keep vLLM's client of the engine, which the routes ask; vLLM calls this once the client exists."""
        state.flexquant_engine = engine_client


async def status(request: Request) -> JsonObject:
    """Return the first rank's status, with the sums of all engines' counters, and policies that differ.

    Raises HTTPException 404 if no merged checkpoint is served.
    """
    return sum_up(await ask_briefly(request, "flexquant_status"))


def sum_up(ranks: list[JsonObject]) -> JsonObject:
    """Combine the statuses of all ranks into one."""
    counted = [rank["counted"] for rank in ranks if rank["counted"] is not None]
    policies = [*{rank["policy"]["digest"]: rank["policy"] for rank in ranks}.values()]
    summed = {**ranks[0], "counted": add_up(counted) if counted else None, "ranks": len(ranks)}
    return summed | ({"disagreement": policies} if len(policies) > 1 else {})


def add_up(counted: Iterable[list[JsonObject]]) -> list[JsonObject]:
    """Add the counters of several engines, by plan and phase."""
    cells: dict[tuple[str, str], Counter[str]] = {}
    for cell in itertools.chain.from_iterable(counted):
        where = cell["plan"], cell["phase"]
        cells.setdefault(where, Counter()).update(
            {name: value for name, value in cell.items() if name not in ("plan", "phase")}
        )
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
