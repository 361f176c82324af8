# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Ranks compare what they were given before they load anything; test_two_machines starts whole servers so."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from flexquant.errors import FlexQuantError
from flexquant.policy.routes import build_route_table
from flexquant.policy.rules import parse_policy_text
from flexquant.serving.worker.ranks import check_ranks_agree, on_all_ranks
from tests.policies import LAYERED_DECODE, THRESHOLD

CONFIG = {"variants": {"w8a8": {}, "w4a16": {}}}
FIRST = (LAYERED_DECODE, 64, CONFIG)
"""A rank's policy, most tokens of a pass, and section of config.json."""
OTHER_ROUTES = "rank 1 has other routes than rank 0"
DERIVED = """
schema: flexquant.policy/v1
derive: {fast: {from: w4a16, activations: %s, weights: %s}}
rules: [{use: fast}]
"""
CASES = {
    "equal": (FIRST, FIRST, ""),
    "policy": (FIRST, (THRESHOLD, 64, CONFIG), OTHER_ROUTES),
    "derived": (
        (DERIVED % ("int8", "int4"), 64, CONFIG),
        (DERIVED % ("fp8", "int4"), 64, CONFIG),
        OTHER_ROUTES,
    ),
    "limits": (FIRST, (LAYERED_DECODE, 128, CONFIG), OTHER_ROUTES),
    "checkpoint": (
        FIRST,
        (LAYERED_DECODE, 64, {}),
        "rank 1 has other quantization_config in config.json than rank 0",
    ),
}
"""Case -> what rank 0 and what rank 1 has, and what both ranks say."""
STEPS = {
    "taken": (None, ""),
    "refused": (FlexQuantError("not here"), "not here"),
    "unforeseen": (KeyError("w4a8"), "KeyError ('w4a8'), and the worker's log tells where"),
}
"""Case -> what rank 1 raises in a step of all ranks, and what both ranks say."""


def meet(rank: int, meeting: str, tensor_parallel: int) -> None:
    """Make this process one rank of two, tensor parallel or pipeline parallel."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(2, rank, meeting, rank, "gloo")
        initialize_model_parallel(tensor_parallel, 2 // tensor_parallel, backend="gloo")


def on_both(told: Callable[..., dict[str, str]], tmp_path: Path, tensor_parallel: int) -> dict[str, str]:
    """Return what both of two ranks say, which has to be the same."""
    asked = f"file://{tmp_path}/store", tensor_parallel
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as ranks:
        first, second = (ranks.submit(told, rank, *asked) for rank in range(2))
        assert first.result(timeout=300) == second.result(timeout=300)
    return first.result()


def steps(rank: int, meeting: str, tensor_parallel: int) -> dict[str, str]:
    """Return, by case, what one rank of two says of steps in which rank 1 may fail."""
    meet(rank, meeting, tensor_parallel)

    def step(failure: Exception | None) -> None:
        if rank and failure is not None:
            raise failure

    said = {}
    for name, (failure, _) in STEPS.items():
        try:
            said[name] = on_all_ranks(lambda failure=failure: step(failure)) or ""
        except FlexQuantError as e:
            said[name] = str(e)
    return said


def refusals(rank: int, meeting: str, tensor_parallel: int) -> dict[str, str]:
    """Return, by case, what the check says on one rank of two; empty if it says nothing."""
    meet(rank, meeting, tensor_parallel)
    said = {}
    for name, (*of_ranks, _) in CASES.items():
        text, max_tokens, config = of_ranks[rank]
        policy, variants = parse_policy_text(text.encode(), "policy", "policy"), ["w8a8", "w4a16"]
        routes = build_route_table(policy, variants, num_layers=2, max_tokens=max_tokens)
        try:
            check_ranks_agree(routes, config)
            said[name] = ""
        except FlexQuantError as e:
            said[name] = str(e)
    return said


def test_all_ranks_refuse_what_one_has_otherwise(tmp_path: Path):
    said = on_both(refusals, tmp_path, 2)
    for name, (*_, expected) in CASES.items():
        assert said[name].startswith(expected) and bool(said[name]) == bool(expected), name


@pytest.mark.parametrize("tensor_parallel", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_step_fails_on_all_ranks_or_on_none(tmp_path: Path, tensor_parallel: int):
    assert on_both(steps, tmp_path, tensor_parallel) == {name: said for name, (_, said) in STEPS.items()}
