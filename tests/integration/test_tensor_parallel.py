# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Two tensor-parallel ranks: each finds the same routes by itself; a pure plan is the static checkpoint."""

from __future__ import annotations

import json
import os

import pytest
from vllm.platforms import current_platform

from flexquant.serving.cpu.kernels import provide_cpu_kernels
from tests.integration.conftest import engine
from tests.integration.test_compile import PLAN, PROMPTS, SEVERAL, SIZES, TOKENS, answers_by_number

CORES = sorted(os.sched_getaffinity(0))
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not current_platform.is_cpu(), reason="gives each rank a CPU core of its own"),
    pytest.mark.skipif(len(CORES) < 2, reason="two ranks need a core each, and this process has one"),
]


class WithCpuKernels:
    """Workers import the module of their extension: so those of stock vLLM get what they lack on this CPU."""


provide_cpu_kernels()


@pytest.fixture(scope="module", autouse=True)
def one_core_for_each_rank():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, CORES[:2])))
        yield


def run(folder, policy=None, **options):
    """Answers on two ranks, by the number of prompts side by side."""
    options |= {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    options |= {"worker_extension_cls": f"{__name__}.{WithCpuKernels.__name__}"}
    with engine(folder, policy, **SIZES, **options) as llm:
        return answers_by_number(llm)


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen2", marks=pytest.mark.full)])
def folder(request, tiny_merged):
    return tiny_merged(request.param, num_layers=2)


@pytest.fixture(scope="module")
def several(folder, tmp_path_factory):
    """The merged checkpoint's answers, and the trace of each rank."""
    work = tmp_path_factory.mktemp("several")
    (work / "policy.yaml").write_text(SEVERAL)
    trace = work / "routes.jsonl"
    by_number = run(folder / "merged", str(work / "policy.yaml"), flexquant={"trace": str(trace)})
    traces = [trace, trace.with_name("routes.jsonl.rank1")]
    return by_number, [[json.loads(line) for line in t.read_text().splitlines()] for t in traces]


def test_both_ranks_take_the_policys_routes(several):
    _, (first, second) = several
    assert first == second
    assert {(r["sequences"], r["phase"]): r["plan"] for r in first[1:]} == PLAN
    assert len(first[1:]) == len(PROMPTS) * TOKENS


@pytest.mark.parametrize(("variant", "number"), [("w4a16", 1), ("w8a8", 3)])
def test_pure_plans_equal_the_static_checkpoints(variant, number, folder, several):
    by_number, _ = several
    static = run(folder / variant)
    assert by_number[number] == static[number]
    assert by_number[2] != static[2], "which the layered plan answered"
