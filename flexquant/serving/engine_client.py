# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Asking the workers of all engines behind an API server, several with data parallelism."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable
from typing import Any, TypeVar

Answer = TypeVar("Answer")


def serves_merged(engine: Any) -> bool:
    """Whether an engine, vLLM's client of it, serves a merged checkpoint with FlexQuant's workers."""
    from flexquant.checkpoint.merged_config import QUANT_METHOD
    from flexquant.serving.registration import WORKER_EXTENSION

    config = engine.vllm_config
    is_merged = config.model_config.quantization == QUANT_METHOD
    return is_merged and config.parallel_config.worker_extension_cls == WORKER_EXTENSION


async def ask_workers(engine: Any, method: str, *args: Any, timeout: float) -> list[Any]:
    """Return what every rank of every engine answers to a method of FlexQuant's worker extension.

    Engines each answer between two of their own steps. Raises TimeoutError after ``timeout`` seconds, or is
    cancelled: engines answer all the same, in the order in which they were asked.
    """
    # AsyncLLM.collective_rpc asks all engines too, but returns the answers of the first alone. The engines
    # get no timeout: after one, vLLM's executor takes the late answer for that to its next question.
    client = engine.engine_core
    ranks: list[list[Any]] = await answer_of(
        asyncio.gather(
            *(
                client._call_utility_async("collective_rpc", method, None, args, None, engine=core)
                for core in client.core_engines
            )
        ),
        timeout,
    )
    return [*itertools.chain.from_iterable(ranks)]


async def answer_of(question: Awaitable[Answer], timeout: float | None) -> Answer:
    """Return the answer to a question, which goes on where who waits for it is cancelled.

    Raises TimeoutError after ``timeout`` seconds (None: waits for ever), and leaves the question under way.
    """
    asked = asyncio.ensure_future(question)
    await asyncio.wait({asked}, timeout=timeout)
    if not asked.done():
        raise TimeoutError(f"no answer within {timeout} s")
    return asked.result()
