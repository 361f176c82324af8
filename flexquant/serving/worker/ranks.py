# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Have all ranks agree: on the routes and the quantisation at the start, and on every later step.

On one machine the routes are always equal, since the front end resolves the policy for all workers. With
several machines, each has a front end of its own, which reads its own files.
"""

import itertools
from collections.abc import Callable
from typing import TypeVar, cast

import torch
from vllm.logger import init_logger

from flexquant.checkpoint.model_config import JsonObject
from flexquant.documents.results import digest_of
from flexquant.errors import FlexQuantError, said_by
from flexquant.policy.routes import RouteTable
from flexquant.serving.vllm_api import get_pp_group, get_tp_group, get_world_group

logger = init_logger("vllm.flexquant.ranks")

Result = TypeVar("Result")


def check_ranks_agree(routes: RouteTable, quantization_config: JsonObject) -> None:
    """Raise :class:`FlexQuantError` on all ranks, which all call this, if routes or merges differ."""
    world = get_world_group()
    if world.world_size == 1:
        return
    mine = {"routes": digest_of(routes.to_json())}
    mine["quantization_config in config.json"] = digest_of(quantization_config)
    everyones: list[dict[str, str]] = [{}] * world.world_size
    torch.distributed.all_gather_object(everyones, mine, group=world.cpu_group)
    for what in mine:
        others = [rank for rank, digests in enumerate(everyones) if digests[what] != everyones[0][what]]
        if others:
            advice = "give every machine the same policy file, merged checkpoint and options of vLLM"
            raise FlexQuantError(f"rank {others[0]} has other {what} than rank 0; {advice}")


def on_all_ranks(step: Callable[[], Result]) -> Result:
    """Return a step's result on every rank, all of which call this; raise on all what fails on one."""
    result: Result | None = None
    failure: Exception | None = None
    everyones = [""]
    try:
        result = step()
    except FlexQuantError as e:
        failure, everyones = e, [str(e)]
    except Exception as e:
        failure, everyones = e, [f"{type(e).__name__} ({said_by(e)}), and the worker's log tells where"]
        logger.exception("a step that all ranks have to take together has failed")
    # Do not use the world group: it also has replicas of a mixture of experts, which run at other times.
    for group in (get_tp_group(), get_pp_group()):
        theirs: list[list[str]] = [[]] * group.world_size
        torch.distributed.all_gather_object(theirs, everyones, group=group.cpu_group)
        everyones = [*itertools.chain.from_iterable(theirs)]
    if reasons := [reason for reason in everyones if reason]:
        raise FlexQuantError(reasons[0]) from failure
    return cast(Result, result)
