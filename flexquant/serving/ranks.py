# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""All ranks route alike: they have the same routes over the same quantisation, or none serves.

On one machine that cannot be otherwise, since the front end reads the policy for all workers. Of several
machines, started by a command on each, every one has a front end of its own, which reads its own files.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from flexquant.documents.digest import digest_of
from flexquant.errors import FlexQuantError
from flexquant.policy.routes import RouteTable
from flexquant.policy.rules import PHASES
from flexquant.serving.vllm_api import get_world_group


def check_ranks_agree(routes: RouteTable, quantization_config: dict[str, Any]) -> None:
    """Raise :class:`FlexQuantError`, on all ranks, if one has other routes or another merged checkpoint.

    ``quantization_config``: the section of the merged checkpoint's config.json. Every rank has to call this.
    """
    world = get_world_group()
    if world.world_size == 1:
        return
    intervals = {
        phase: [
            (*span, [(row.min_tokens, row.max_tokens, row.plan.layers) for row in rows])
            for span in routes.spans(phase)
            if (rows := routes.intervals(phase, span.moment))
        ]
        for phase in PHASES
    }
    trigger = routes.trigger and asdict(routes.trigger)
    mine = {
        "routes": digest_of({"intervals": intervals, "trigger": trigger}),
        "quantization_config in config.json": digest_of(quantization_config),
    }
    everyones: list[dict[str, str]] = [{}] * world.world_size
    torch.distributed.all_gather_object(everyones, mine, group=world.cpu_group)
    for what in mine:
        others = [rank for rank, digests in enumerate(everyones) if digests[what] != everyones[0][what]]
        if others:
            raise FlexQuantError(
                f"rank {others[0]} has other {what} than rank 0; give every machine the same policy file, "
                "merged checkpoint and options of vLLM"
            )


def all_ranks(mine: bool) -> bool:
    """Return whether something holds on every rank; ``mine`` is this one's. Every rank has to call this."""
    world = get_world_group()
    everyones = [mine] * world.world_size
    if world.world_size > 1:
        torch.distributed.all_gather_object(everyones, mine, group=world.cpu_group)
    return all(everyones)
