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
from vllm.platforms import current_platform

from flexquant.serving.kernels.cpu_kernels import provide_cpu_kernels
from flexquant.serving.worker.worker_extension import FlexQuantWorker
from tests.integration.conftest import Answers, engine, records_of
from tests.integration.test_compile import PLAN, PROMPTS, SEVERAL, SIZES, TOKENS, answers_by_number

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.worker.worker_base import WorkerBase

Ranks = dict[str, int]
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


@contextmanager
def engine_on(
    folder: Path, ranks: Ranks, policy: str | None = None, trace: Path | None = None, executor: str = "mp"
) -> Iterator[LLM]:
    """Yield an engine on several ranks.

    ``ranks`` are vLLM's options that ask for them; ``executor`` is vLLM's name of what starts them.
    """
    options: dict[str, Any] = {**SIZES, **ranks, "distributed_executor_backend": executor}
    options |= {"worker_extension_cls": f"{__name__}.{WorkerOnTwoRanks.__name__}"}
    options["flexquant"] = {"trace": str(trace)} if trace else {}
    cores = "|".join(str(CORES[i % 2]) for i in range(math.prod(ranks.values())))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", cores)
        with engine(folder, policy, **options) as llm:
            if "pipeline_parallel_size" in ranks:
                llm.collective_rpc("provide_intermediate_tensors")
            yield llm


def run(folder: Path, ranks: Ranks, policy: str | None = None) -> dict[int, Answers]:
    """Return the answers on several ranks, keyed by the number of prompts side by side."""
    with engine_on(folder, ranks, policy) as llm:
        return answers_by_number(llm)


class Several(NamedTuple):
    """What is left of a merged checkpoint under the policy ``SEVERAL``."""

    answers: dict[int, Answers]
    header: list[dict[str, Any]]
    """What the trace of each rank says is served."""
    passes: list[dict[str, Any]]
    """The passes of the answers, which the traces of all ranks have."""
    after: list[dict[str, Any]]
    """What the traces have after these."""
    told: Any
    """What the function that was called in the end returned."""

    def check_routes(self) -> None:
        """Assert that all ranks took the policy's plan in every pass."""
        assert {(p["sequences"], p["phase"]): p["plan"] for p in self.passes} == PLAN
        assert len(self.passes) == len(PROMPTS) * TOKENS
        assert all(header["plans"] == self.header[0]["plans"] for header in self.header)


def run_several(
    folder: Path, ranks: Ranks, work: Path, executor: str = "mp", policy: str = SEVERAL, finish: Any = None
) -> Several:
    """Serve the merged checkpoint in ``folder``, and then call ``finish``; ``work`` is an empty folder."""
    trace = work / "routes.jsonl"
    with engine_on(folder, ranks, policy, trace, executor) as llm:
        by_number = answers_by_number(llm)
        told = finish and finish(llm)
    others = (trace.with_name(f"routes.jsonl.rank{rank}") for rank in range(1, math.prod(ranks.values())))
    traces = [records_of(file) for file in (trace, *others)]
    first = traces[0][1:]
    assert all(found[1:] == first for found in traces)
    answered = len(PROMPTS) * TOKENS
    return Several(by_number, [found[0] for found in traces], first[:answered], first[answered:], told)
