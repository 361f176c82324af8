# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Ask the workers of all engines behind an API server; data parallelism has several engines."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from flexquant.serving.vllm_api import AsyncLLM, AsyncMPClient

Answer = TypeVar("Answer")


def serves_merged(engine: AsyncLLM) -> bool:
    """Whether the engine of vLLM's client ``engine`` serves a merged checkpoint with FlexQuant's workers."""
    from flexquant.checkpoint.merged_config import QUANT_METHOD
    from flexquant.serving.registration import WORKER_EXTENSION

    config = engine.vllm_config
    is_merged = config.model_config.quantization == QUANT_METHOD
    return is_merged and config.parallel_config.worker_extension_cls == WORKER_EXTENSION


async def ask_workers(engine: AsyncLLM, method: str, *args: Any, timeout: float) -> list[Any]:
    """Call a method of FlexQuant's worker extension on every rank of every engine; return all answers.

    Each engine answers between two of its own steps. Raises TimeoutError after ``timeout`` seconds. After a
    timeout or a cancellation the engines still answer, in the order in which they were asked.
    """
    # AsyncLLM.collective_rpc also asks all engines, but returns only the first one's answers. The engines get
    # no timeout: after one, vLLM's executor would take the late answer for the answer to its next question.
    client: AsyncMPClient = engine.engine_core
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
    """Return the answer to a question, which continues if the waiting task is cancelled.

    Raises TimeoutError after ``timeout`` seconds (None: no limit); the question continues then, too.
    """
    asked = asyncio.ensure_future(question)
    await asyncio.wait({asked}, timeout=timeout)
    if not asked.done():
        raise TimeoutError(f"no answer within {timeout} s")
    return asked.result()
