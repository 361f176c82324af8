# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Asking the workers of all engines behind an API server, several with data parallelism."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any


def serves_merged(engine: Any) -> bool:
    """Whether an engine, vLLM's client of it, serves a merged checkpoint with FlexQuant's workers."""
    from flexquant.checkpoint.merged_config import QUANT_METHOD
    from flexquant.serving.registration import WORKER_EXTENSION

    config = engine.vllm_config
    is_merged = config.model_config.quantization == QUANT_METHOD
    return is_merged and config.parallel_config.worker_extension_cls == WORKER_EXTENSION


async def ask_workers(engine: Any, method: str, *args: Any, timeout: float) -> list[Any]:
    """Return what every rank of every engine answers to a method of FlexQuant's worker extension.

    ``timeout`` in seconds. Engines each answer between two of their own steps.
    """
    # AsyncLLM.collective_rpc asks all engines too, but returns the answers of the first alone.
    client = engine.engine_core
    ranks: list[list[Any]] = await asyncio.gather(
        *(
            client._call_utility_async("collective_rpc", method, timeout, args, None, engine=core)
            for core in client.core_engines
        )
    )
    return [*itertools.chain.from_iterable(ranks)]
