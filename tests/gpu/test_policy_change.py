# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Another policy while requests are under way: graphs hold its plans from the next step, or it is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from vllm import SamplingParams
from vllm.compilation import monitor
from vllm.compilation.counter import compilation_counter

from tests.gpu.conftest import ON_GPU, RUNNERS, graph_engine
from tests.gpu.test_plans_in_graphs import BY_BATCH, MODES, OPPOSITE_OF_BY_BATCH
from tests.gpu.test_replays import check_steps, traced, watch_steps
from tests.integration.conftest import change as ask_change
from tests.policies import LAYERED_DECODE

pytestmark = pytest.mark.skipif(ON_GPU, reason="CUDA's graphs do not tell what is in them")


def change(llm: Any, name: str, policy: str, dry_run: bool = False) -> dict[str, Any]:
    return ask_change(llm, name, yaml.safe_load(policy), dry_run)


def add(llm: Any, sequences: int, tokens: int) -> None:
    parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for i in range(sequences):
        llm.llm_engine.add_request(f"{tokens}-{i}", f"{i} of several", parameters)


def step(llm: Any, times: int | None = None) -> list[Any]:
    """Let the engine take some steps, or all that are left; return the answers that were finished."""
    finished = []
    while llm.llm_engine.has_unfinished_requests() and times != 0:
        finished += [output for output in llm.llm_engine.step() if output.finished]
        times = None if times is None else times - 1
    return finished


@pytest.fixture
def policy(tmp_path: Path) -> str:
    (tmp_path / "p.yaml").write_text(BY_BATCH)
    return str(tmp_path / "p.yaml")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def serve(checkpoints: Path, policy: str, trace: Path) -> Any:
    """Return a function: (runner, graph mode) -> an engine under ``policy`` that writes ``trace``."""
    options = {"flexquant": {"trace": str(trace)}}
    return lambda runner, mode: graph_engine(checkpoints / "merged", runner, mode, policy, **options)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("mode", MODES)
def test_every_replay_is_of_the_plan_that_the_policy_gives(runner, mode, serve, trace):
    with serve(runner, mode) as llm:
        steps = watch_steps(llm)
        captured = compilation_counter.num_cudagraph_captured
        add(llm, 3, 12)
        step(llm, 4)
        before = len(traced(trace))
        asked = change(llm, "opposite", OPPOSITE_OF_BY_BATCH, dry_run=True)
        assert compilation_counter.num_cudagraph_captured == captured
        told = change(llm, "opposite", OPPOSITE_OF_BY_BATCH)
        assert told == asked
        assert told["captures_graphs"]
        assert ("w4a16", "w8a8") in {(row["before"], row["after"]) for row in told["routes"]}
        recaptured = compilation_counter.num_cudagraph_captured
        assert recaptured > captured
        finished = step(llm, 4)
        add(llm, 6, 5)
        finished += step(llm)
        assert sorted(len(output.outputs[0].token_ids) for output in finished) == [5] * 6 + [12] * 3
        back = change(llm, "by batch", BY_BATCH)
        assert back["captures_graphs"] == (mode != "PIECEWISE"), "all pieces are there"
        add(llm, 3, 4)
        step(llm)
    passes = traced(trace)
    check_steps(mode, passes, steps)
    decodes = [p["plan"] for p in passes[:before] if p["phase"] == "decode"]
    assert set(decodes) == {"w4a16"}
    assert passes[before]["plan"] == "w8a8", "from the next step on"
    assert passes[-1]["plan"] == "w4a16"


@pytest.mark.parametrize("runner", ["V1"])
def test_a_replay_before_the_change_counts_for_the_policy_before(runner, monkeypatch, serve, trace):
    with serve(runner, "FULL_DECODE_ONLY") as llm:
        model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
        # A pipeline-parallel rank without logits does not call it either; the call would notice a replay.
        monkeypatch.setattr(model.observer, "settle", lambda: None)
        add(llm, 1, 4)
        step(llm, 2)
        monkeypatch.undo()
        assert len(traced(trace)) == 1
        change(llm, "opposite", OPPOSITE_OF_BY_BATCH)
        step(llm)
    assert [p["plan"] for p in traced(trace)] == ["w8a8", "w4a16", "w8a8", "w8a8"]


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_capture_that_fails_leaves_the_policy_before(runner, policy, monkeypatch, serve, trace):
    """If no capture succeeds any more, passes run without graphs."""
    mode = "FULL_AND_PIECEWISE"
    with serve(runner, mode) as llm:
        steps = watch_steps(llm)
        add(llm, 3, 8)
        step(llm, 3)
        worker = llm.llm_engine.model_executor.driver_worker.worker
        capture, failures = worker.model_runner.capture_model, [torch.OutOfMemoryError("out of memory")]

        def fail_once() -> int:
            taken = capture()
            if failures:
                raise failures.pop()
            return taken

        monkeypatch.setattr(worker.model_runner, "capture_model", fail_once)
        told = change(llm, "opposite", OPPOSITE_OF_BY_BATCH)
        assert told.keys() == {"refused"}
        assert "out of memory" in told["refused"]
        (status,) = llm.collective_rpc("flexquant_status")
        assert status["policy"]["name"] == policy
        step(llm)
        check_steps(mode, traced(trace), steps)
        assert [p["plan"] for p in traced(trace)] == ["w8a8", *["w4a16"] * 7]

        def fail() -> int:
            # vLLM's V1 runner allows captures before it begins one, and forbids them when it ends.
            monitor.set_cudagraph_capturing_enabled(True)
            raise torch.OutOfMemoryError("out of memory")

        add(llm, 3, 7)
        step(llm, 3)
        monkeypatch.setattr(worker.model_runner, "capture_model", fail)
        refused = change(llm, "opposite", OPPOSITE_OF_BY_BATCH)["refused"]
        assert f"{policy} is served without CUDA graphs" in refused
        captured, before = compilation_counter.num_cudagraph_captured, len(steps)
        add(llm, 5, 4)
        step(llm)
        told = change(llm, "opposite", OPPOSITE_OF_BY_BATCH)
        assert told["captures_graphs"] is False
        add(llm, 1, 3)
        step(llm)
        assert compilation_counter.num_cudagraph_captured == captured
    assert steps[before:] and not any(step.replayed for step in steps[before:])
    assert [p["plan"] for p in traced(trace)[-3:]] == ["w8a8"] * 3


@pytest.mark.parametrize("runner", RUNNERS)
def test_pieces_that_are_there_and_pieces_of_a_capture_that_failed(runner, monkeypatch, serve, trace):
    """Of ``opposite``, a plan has a graph of its first piece for 8 tokens; that of the second has failed."""
    mode = "PIECEWISE"
    narrower = BY_BATCH.replace("max: 4", "max: 3").replace("max: 8", "max: 9")
    with serve(runner, mode) as llm:
        steps = watch_steps(llm)
        captured = compilation_counter.num_cudagraph_captured
        refused = change(llm, "layered", LAYERED_DECODE)["refused"]
        assert "layered has the plan w8a8+w4a16[0], but the server has compiled w8a8, w4a16" in refused
        add(llm, 4, 6)
        step(llm, 3)
        assert not change(llm, "narrower", narrower)["captures_graphs"]
        step(llm)
        assert compilation_counter.num_cudagraph_captured == captured
        capture, begun = torch.cuda.graph, itertools.count()

        def fail_at_the_second(*args: Any, **options: Any) -> Any:
            if next(begun) == 1:
                raise torch.OutOfMemoryError("out of memory")
            return capture(*args, **options)

        monkeypatch.setattr(torch.cuda, "graph", fail_at_the_second)
        assert "out of memory" in change(llm, "opposite", OPPOSITE_OF_BY_BATCH)["refused"]
        told = change(llm, "opposite", OPPOSITE_OF_BY_BATCH)
        assert told["captures_graphs"]
        captured = compilation_counter.num_cudagraph_captured
        add(llm, 7, 4)
        step(llm)
        assert compilation_counter.num_cudagraph_captured == captured
    check_steps(mode, traced(trace), steps)
    plans = ["w8a8", *["w4a16"] * 2, *["w8a8"] * 3, "w8a8", *["w4a16"] * 3]
    assert [p["plan"] for p in traced(trace)] == plans
