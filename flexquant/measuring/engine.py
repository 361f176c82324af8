# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""vLLM in this process, freed on leaving."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexquant.errors import FlexQuantError

if TYPE_CHECKING:
    from vllm import LLM


def prepare_environment() -> None:
    """Set what vLLM and OpenMP read when they are imported, unless it is set already; call before that."""
    # In this process a call of generate() hands over all its prompts before the first pass. An engine core
    # in another process may begin with those that have arrived, and batches would differ from run to run.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # On a CPU vLLM would claim nine tenths of the memory for the KV cache, in GiB here; a GPU ignores it.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set environment variables, and leave the caller's as they were."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def engine(folder: Path | str, **options: Any) -> Iterator[LLM]:
    """An engine on ``folder`` with vLLM's ``options``, eager on a CPU; its memory is free again after.

    ``flexquant`` among the options becomes ``additional_config``'s key of that name, if it is not empty.
    """
    prepare_environment()
    import torch
    from vllm import LLM
    from vllm.platforms import current_platform

    from flexquant.serving.vllm_api import cleanup_dist_env_and_memory

    if flexquant := options.pop("flexquant", None):
        options["additional_config"] = {"flexquant": flexquant}
    # What the caller of an earlier engine still held when that was left is free only now.
    gc.collect()
    # vLLM collects garbage at every stage of its start; in what has been imported there is none to find.
    gc.freeze()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    llm = None
    try:
        llm = LLM(str(folder), **{"enforce_eager": current_platform.is_cpu(), "seed": 0, **options})
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def take_policy(llm: LLM, name: str, document: dict[str, Any]) -> None:
    """Route by another policy from now on; FlexQuantError where the engine cannot take it."""
    for answer in llm.collective_rpc("flexquant_change_policy", args=(name, document, False)):
        if "refused" in answer:
            raise FlexQuantError(answer["refused"])
