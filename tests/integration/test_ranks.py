# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Ranks compare what they were given before they load anything; test_two_machines starts whole servers so."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from flexquant.errors import FlexQuantError
from flexquant.policy.routes import build_route_table
from flexquant.policy.rules import load_policy
from flexquant.serving.ranks import check_ranks_agree

CONFIG = {"variants": {"w8a8": {}, "w4a16": {}}}
FIRST = ("phase", 64, CONFIG)
"""What rank 0 has: policy, most tokens of a pass, and the section of config.json."""
CASES = {
    "equal": (FIRST, ""),
    "policy": (("w8a8", 64, CONFIG), "rank 1 has other routes than rank 0"),
    "limits": (("phase", 128, CONFIG), "rank 1 has other routes than rank 0"),
    "checkpoint": (("phase", 64, {}), "rank 1 has other quantization_config in config.json than rank 0"),
}
"""What rank 1 has, and what both say."""


def refusals(rank: int, meeting: str) -> dict[str, str]:
    """What the check says in a process that is one rank of two, by case; empty if nothing."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(2, rank, meeting, rank, "gloo")
    said = {}
    for name, (other, _) in CASES.items():
        policy, max_tokens, config = other if rank else FIRST
        variants = ["w8a8", "w4a16"]
        routes = build_route_table(load_policy(policy), variants, num_layers=2, max_tokens=max_tokens)
        try:
            check_ranks_agree(routes, config)
            said[name] = ""
        except FlexQuantError as e:
            said[name] = str(e)
    return said


def test_all_ranks_refuse_what_one_has_otherwise(tmp_path: Path):
    meeting = f"file://{tmp_path}/store"
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as ranks:
        first, second = (ranks.submit(refusals, rank, meeting) for rank in range(2))
        assert first.result(timeout=120) == second.result(timeout=120)
    for name, (_, expected) in CASES.items():
        said = first.result()[name]
        assert said.startswith(expected) and bool(said) == bool(expected), name
