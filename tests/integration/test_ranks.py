# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Ranks compare what they were given before they load anything; test_data_parallel starts servers so."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest

from flexquant.errors import FlexQuantError
from flexquant.policy.routes import build_route_table
from flexquant.policy.rules import parse_policy_text
from flexquant.serving.worker.ranks import check_ranks_agree, on_all_ranks
from tests.policies import LAYERED_DECODE, THRESHOLD, rules

CONFIG = {"variants": {"w8a8": {}, "w4a16": {}}}
FIRST = (LAYERED_DECODE, 64, CONFIG)
"""A rank's policy, most tokens of a pass, and section of config.json."""
OTHER_ROUTES, OF_CONFIG = "rank 1 has other routes than rank 0", "quantization_config in config.json"
DERIVED = rules("- use: fast") + "derive: {fast: {from: w4a16, activations: %s, weights: int4}}\n"
CASES = {
    "equal": (FIRST, FIRST, ""),
    "policy": (FIRST, (THRESHOLD, 64, CONFIG), OTHER_ROUTES),
    "derived": ((DERIVED % "int8", 64, CONFIG), (DERIVED % "fp8", 64, CONFIG), OTHER_ROUTES),
    "limits": (FIRST, (LAYERED_DECODE, 128, CONFIG), OTHER_ROUTES),
    "checkpoint": (FIRST, (LAYERED_DECODE, 64, {}), OTHER_ROUTES.replace("routes", OF_CONFIG)),
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


def said_by(ask: Callable[[], object]) -> str:
    """Return the message of a refusal; empty if there is none."""
    try:
        ask()
    except FlexQuantError as e:
        return str(e)
    return ""


def fail(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def tell(rank: int, meeting: str, tensor_parallel: int) -> dict[str, str]:
    """Return, by case, what one rank of two says of what both were given, and of steps that rank 1 fails."""
    meet(rank, meeting, tensor_parallel)
    said = {}
    for name, (*of_ranks, _) in CASES.items():
        text, max_tokens, config = of_ranks[rank]
        policy, variants = parse_policy_text(text.encode(), "policy", "policy"), ["w8a8", "w4a16"]
        routes = build_route_table(policy, variants, num_layers=2, max_tokens=max_tokens)
        said[name] = said_by(partial(check_ranks_agree, routes, config))
    for name, (failure, _) in STEPS.items():
        said[name] = said_by(partial(on_all_ranks, partial(fail, failure if rank else None)))
    return said


@pytest.mark.parametrize("tensor_parallel", [pytest.param(1, marks=pytest.mark.full), 2])
def test_both_ranks_refuse_what_one_has_otherwise_and_fail_where_one_does(tmp_path, tensor_parallel):
    asked = f"file://{tmp_path}/store", tensor_parallel
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as ranks:
        first, second = (ranks.submit(tell, rank, *asked) for rank in range(2))
        said = first.result(timeout=300)
        assert said == second.result(timeout=300)
    for name, (*_, expected) in CASES.items():
        assert said[name].startswith(expected) and bool(said[name]) == bool(expected), name
    assert {name: said[name] for name in STEPS} == {name: expected for name, (_, expected) in STEPS.items()}
