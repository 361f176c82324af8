# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Trace and metrics have every step of vLLM's scheduler with its tokens and sequences, and no other."""

from collections import Counter
from typing import Any

import pytest
from vllm.config import CUDAGraphMode

from tests.gpu.conftest import RUNNERS, graph_engine
from tests.gpu.test_plans_in_graphs import BY_BATCH
from tests.integration.conftest import answers, records_of

STEPS = 12
BLOCK, BLOCKS = 32, 10
"""Nine blocks beside vLLM's own; the six requests below need thirteen at their end, one of them shared."""
SHARED = "The same words at the beginning of every prompt. "
PROMPTS = [SHARED + letter * 9 for letter in "abcdef"]
LONG = "A prompt of more tokens than one pass may have, which takes several of them. " * 2


def counted(llm: Any, name: str) -> Counter[tuple[str, str]]:
    """Return a counter's values by plan and phase, those of graph replays over all modes."""
    (model,) = llm.apply_model(lambda model: getattr(model, "runnable", model))
    found: Counter[tuple[str, str]] = Counter()
    for cell in model.records.counted():
        for key in cell.keys() & {name, *(f"{name}_{mode.name}" for mode in CUDAGraphMode)}:
            found[cell["plan"], cell["phase"]] += cell[key]
    return found


@pytest.mark.parametrize("mode", [None, "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_steps_tokens_and_sequences_are_the_schedulers(runner, mode, checkpoints, tmp_path):
    """Chunked prefill, prefix caching and preemption each have to happen."""
    trace = tmp_path / "trace.jsonl"
    scheduled: list[tuple[int, int]] = []
    happened: Counter[str] = Counter()
    options: dict[str, Any] = {"enable_prefix_caching": True, "max_num_batched_tokens": 64}
    options |= {"block_size": BLOCK, "num_gpu_blocks_override": BLOCKS, "max_model_len": 256}
    options["flexquant"] = {"trace": str(trace)}
    with graph_engine(checkpoints / "apart", runner, mode, BY_BATCH, **options) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        schedule, preempt = scheduler.schedule, scheduler._preempt_request

        def noted(*args: Any, **options: Any) -> Any:
            output = schedule(*args, **options)
            if tokens := output.num_scheduled_tokens:
                scheduled.append((sum(tokens.values()), len(tokens)))
            happened["cached"] += sum(new.num_computed_tokens > 0 for new in output.scheduled_new_reqs)
            happened["chunked"] += any(0 < n < len(LONG) and n > len(PROMPTS[0]) for n in tokens.values())
            return output

        def noted_preempt(*args: Any, **options: Any) -> Any:
            happened["preempted"] += 1
            return preempt(*args, **options)

        scheduler.schedule, scheduler._preempt_request = noted, noted_preempt
        for batch in ([LONG], PROMPTS[:1], PROMPTS):
            answers(llm, batch, max_tokens=STEPS, ignore_eos=True, logprobs=1)
        names = ("forward", "tokens", "forward_seconds", "graph_replays")
        told = {name: counted(llm, name) for name in names}
    _, *passes = records_of(trace)
    assert [(p["scheduled_tokens"], p["sequences"]) for p in passes] == scheduled
    assert all(p["tokens"] >= p["scheduled_tokens"] for p in passes)
    assert happened["cached"] and happened["chunked"] and happened["preempted"], happened
    cells = Counter((p["plan"], p["phase"]) for p in passes)
    assert told["forward"] == cells
    assert sum(told["tokens"].values()) == sum(tokens for tokens, _ in scheduled)
    assert told["forward_seconds"].keys() == cells.keys()
    some = {None: set(), "FULL_DECODE_ONLY": {"decode"}}
    assert {phase for _, phase in told["graph_replays"]} == some.get(mode, {phase for _, phase in cells})
    assert told["graph_replays"] <= cells


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_batches_that_keep_data_parallel_engines_in_step_are_not_counted(runner, mode, checkpoints, tmp_path):
    """Such a batch runs where another engine has requests: vLLM's worker makes up what it holds."""
    trace = tmp_path / "trace.jsonl"
    options: dict[str, Any] = {"flexquant": {"trace": str(trace)}}
    with graph_engine(checkpoints / "apart", runner, mode, "phase", **options) as llm:
        (model,) = llm.apply_model(lambda model: getattr(model, "runnable", model))
        answers(llm, PROMPTS[:1], max_tokens=STEPS, ignore_eos=True)
        told, counted_before = trace.read_text(), model.records.counted()
        for _ in range(3):
            llm.collective_rpc("execute_dummy_batch")
        model.observer.settle()
        assert (trace.read_text(), model.records.counted()) == (told, counted_before)
        answers(llm, PROMPTS[:1], max_tokens=STEPS, ignore_eos=True)
    assert len(records_of(trace)) == 1 + 2 * STEPS
