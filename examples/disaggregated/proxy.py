# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Hand each request first to a server that prefills, then to one that decodes.

    python examples/disaggregated/proxy.py --prefill http://HOST:8100 --decode http://HOST:8200 --port 8000

The prefill server computes the prompt and one token, and leaves its KV cache to vLLM's connector; the decode
server fetches it and answers. What the first says for the second (``kv_transfer_params``, which NIXL needs)
is passed on. A server's refusal goes to the caller as it is, and a caller who leaves in mid-stream ends the
answer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

UNKNOWN = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
FOR_DECODING_ELSEWHERE = {"do_remote_decode": True, "do_remote_prefill": False, **UNKNOWN}
"""The ``kv_transfer_params`` of a request whose tokens another server will generate."""
OF_THE_ANSWER = ("min_tokens", "max_completion_tokens", "stream_options", "n", "best_of")
"""Fields of a request that the one token from the prefill server has no use for."""
KEPT_HEADERS = ("authorization", "content-type", "traceparent")
TIMEOUT = httpx.Timeout(3600.0, connect=10.0)


def prompt_alone(body: dict[str, Any]) -> dict[str, Any]:
    """Return the same request for one token, whose KV cache another server will fetch."""
    kept = {key: value for key, value in body.items() if key not in OF_THE_ANSWER}
    return kept | {"max_tokens": 1, "stream": False, "kv_transfer_params": FOR_DECODING_ELSEWHERE}


def make_app(prefill: str, decode: str) -> FastAPI:
    """Return the proxy in front of two servers, given by their URLs without ``/v1``."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with httpx.AsyncClient(timeout=TIMEOUT, limits=httpx.Limits(max_connections=None)) as client:
            app.state.client = client
            yield

    app = FastAPI(lifespan=lifespan)

    @app.exception_handler(httpx.TransportError)
    async def unreachable(_: Request, error: httpx.TransportError) -> Response:
        return refusal(502, f"{error.request.url} does not answer ({type(error).__name__})")

    @app.get("/health")
    async def health() -> Response:
        answers = [await app.state.client.get(f"{server}/health") for server in (prefill, decode)]
        return Response(status_code=max(answer.status_code for answer in answers))

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        answer = await app.state.client.get(f"{decode}/v1/models", headers=kept_headers(request))
        return Response(answer.content, answer.status_code, media_type="application/json")

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def generate(request: Request) -> Response:
        try:
            body = json.loads(await request.body())
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return refusal(400, "the body is no JSON object")
        client: httpx.AsyncClient = app.state.client
        route, headers = request.url.path, kept_headers(request)
        prefilled = await client.post(f"{prefill}{route}", json=prompt_alone(body), headers=headers)
        if prefilled.is_error:
            return Response(prefilled.content, prefilled.status_code, media_type="application/json")
        if handed_over := prefilled.json().get("kv_transfer_params"):
            body["kv_transfer_params"] = handed_over
        decoding = client.build_request("POST", f"{decode}{route}", json=body, headers=headers)
        answer = await client.send(decoding, stream=True)

        async def passed_on() -> AsyncIterator[bytes]:
            try:
                async for part in answer.aiter_raw():
                    yield part
            finally:
                await answer.aclose()

        return StreamingResponse(
            passed_on(), answer.status_code, media_type=answer.headers.get("content-type")
        )

    return app


def kept_headers(request: Request) -> dict[str, str]:
    return {name: request.headers[name] for name in KEPT_HEADERS if name in request.headers}


def refusal(code: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": code}}, code)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefill", required=True, help="URL of the server that computes prompts")
    parser.add_argument("--decode", required=True, help="URL of the server that generates")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen at (%(default)s)")
    args = parser.parse_args()
    app = make_app(args.prefill.rstrip("/"), args.decode.rstrip("/"))
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
