# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""``GET /flexquant`` on vLLM's API server: what is served, by which routes, and what was counted.

vLLM adds routes of plugins only where the operator names the plugin: ``VLLM_PLUGINS=flexquant``.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI, HTTPException, Request

if TYPE_CHECKING:
    from argparse import Namespace


class FlexQuantEndpoints:
    """vLLM's ``vllm.endpoint_plugins`` entry point."""

    name = "flexquant"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the route; vLLM calls this when it builds the server."""
        app.add_api_route("/flexquant", status, methods=["GET"], dependencies=[Depends(authorise)])

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Keep vLLM's client of the engine, which the route asks; vLLM calls this when it is there."""
        state.flexquant_engine = engine_client


def authorise(request: Request) -> None:
    """Ask for vLLM's ``--api-key``, if there is one, as vLLM does on ``/v1``; raises HTTPException 401."""
    keys = [key for key in (request.app.state.args.api_key or [os.environ.get("VLLM_API_KEY")]) if key]
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    matches = [secrets.compare_digest(given.encode(), key.encode()) for key in keys]
    if keys and not (scheme.lower() == "bearer" and any(matches)):
        raise HTTPException(401, "Unauthorized", headers={"WWW-Authenticate": "Bearer"})


async def status(request: Request) -> dict[str, Any]:
    """Return the first engine's status; raises HTTPException 404 where no merged checkpoint is served."""
    from flexquant.checkpoint.merged_config import QUANT_METHOD
    from flexquant.serving.registration import WORKER_EXTENSION

    engine = request.app.state.flexquant_engine
    config = engine.vllm_config
    if config.model_config.quantization != QUANT_METHOD:
        raise HTTPException(404, "this server serves no merged checkpoint")
    if config.parallel_config.worker_extension_cls != WORKER_EXTENSION:
        raise HTTPException(
            501, f"the workers have another extension, {config.parallel_config.worker_extension_cls}"
        )
    ranks = await engine.collective_rpc("flexquant_status", timeout=60)
    first, *_ = ranks
    counted = [rank["counted"] for rank in ranks if rank["counted"] is not None]
    return {**first, "counted": counted[0] if counted else None, "ranks": len(ranks)}
