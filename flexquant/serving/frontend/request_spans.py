# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Report to OpenTelemetry which plans computed the tokens of a request, beside vLLM's span of the request.

vLLM ends its span as soon as a request is answered, and an ended span takes no more attributes. So each span
gets a child, ``flexquant.request``, over the same time, in the caller's trace if there is one. The workers
are asked about several requests at once, between two steps of the engine.
"""

from __future__ import annotations

import asyncio
from collections import ChainMap
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from vllm.logger import init_logger

from flexquant.serving.frontend.access import ask_workers
from flexquant.serving.vllm_api import SpanAttributes

if TYPE_CHECKING:
    from flexquant.serving.vllm_api import AsyncLLM

logger = init_logger("vllm.flexquant.spans")

NAME = "flexquant.request"
MOMENT = 0.2
"""Seconds over which ended requests are collected before the workers are asked about them."""
TIMEOUT = 60.0
"""Largest number of seconds for the workers' answer."""


def tokens_attribute(plan: str) -> str:
    """Return the name of the attribute with the tokens that a plan has computed."""
    return f"flexquant.plan.{plan}.tokens"


class RequestSpans(SpanProcessor):
    """Collects the requests whose spans vLLM ends, and gives each span its child."""

    def __init__(self, engine: AsyncLLM) -> None:
        """Take ``engine``, vLLM's client; call this in the loop in which the client runs."""
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Queue[ReadableSpan] = asyncio.Queue()

    def on_end(self, span: ReadableSpan) -> None:
        """Take an ended span; OpenTelemetry calls this for every span, in any thread."""
        if SpanAttributes.GEN_AI_REQUEST_ID in (span.attributes or {}):
            self._loop.call_soon_threadsafe(self._ended.put_nowait, span)

    async def run(self) -> None:
        """Give spans their children until cancelled; spans get none if the workers do not answer."""
        while True:
            spans = [await self._ended.get()]
            await asyncio.sleep(MOMENT)
            while not self._ended.empty():
                spans.append(self._ended.get_nowait())
            try:
                await self._give_children(spans)
            except Exception as e:  # the engine's error, which other routes report, or its end
                logger.warning("the spans of %d requests are without their plans: %s", len(spans), e)

    async def _give_children(self, spans: list[ReadableSpan]) -> None:
        names = {span: str((span.attributes or {})[SpanAttributes.GEN_AI_REQUEST_ID]) for span in spans}
        asked = sorted(set(names.values()))
        ranks = await ask_workers(self._engine, "flexquant_tokens", asked, timeout=TIMEOUT)
        tokens: dict[str, dict[str, int]] = dict(ChainMap(*ranks))
        for span, name in names.items():
            if name in tokens:
                _give_child(span, {tokens_attribute(plan): n for plan, n in tokens[name].items()})


def _give_child(span: ReadableSpan, attributes: dict[str, int]) -> None:
    context = span.get_span_context() or trace.INVALID_SPAN_CONTEXT
    parent = trace.set_span_in_context(trace.NonRecordingSpan(context))
    tracer = trace.get_tracer("flexquant")
    child = tracer.start_span(NAME, parent, attributes=attributes, start_time=span.start_time)
    child.end(span.end_time)


def follow_spans(engine: AsyncLLM) -> asyncio.Task[None] | None:
    """Start to give requests' spans their children; return the task, or None if vLLM has no tracer.

    The caller has to keep the task.
    """
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        return None
    spans = RequestSpans(engine)
    provider.add_span_processor(spans)
    return asyncio.get_running_loop().create_task(spans.run())
