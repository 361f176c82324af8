# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What is replayed, read from the operators that software graphs repeat: in every step the policy's plan.

Another policy while requests are under way: graphs hold its plans from the next step, or it is refused.
"""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from torch.utils._pytree import tree_leaves
from vllm import SamplingParams
from vllm.compilation import monitor
from vllm.compilation.counter import compilation_counter

from tests.gpu.conftest import ON_GPU, RUNNERS, SIZES, graph_engine
from tests.gpu.test_plans_in_graphs import BY_BATCH, BY_SIZE, MODES, OPPOSITE_OF_BY_BATCH
from tests.integration.conftest import answers, records_of
from tests.integration.conftest import change as ask_change
from tests.policies import LAYERED_DECODE

pytestmark = pytest.mark.skipif(ON_GPU, reason="CUDA's graphs do not tell what is in them")

BATCHES = [["one"], [f"{i} of three" for i in range(3)], [f"{i} of seven" for i in range(7)]]
TOKENS = 6


def own_weights(model: Any) -> dict[int, str]:
    """Return the variant of every weight that only one variant has, keyed by the weight's address."""
    owners: dict[int, set[str]] = {}
    for name, variant in model.variants.items():
        for weight in filter(torch.numel, variant.parameters()):
            owners.setdefault(weight.data_ptr(), set()).add(name)
    return {address: next(iter(names)) for address, names in owners.items() if len(names) == 1}


def variants_in(graph: Any, owners: dict[int, str]) -> set[str]:
    """Return the variants whose weights the operators of a graph read."""
    leaves = (leaf for operator in graph.operators for leaf in tree_leaves(operator[1:3]))
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return {owners[t.data_ptr()] for t in tensors if t.data_ptr() in owners}


BY_MODE = [*(pytest.param(mode, BY_BATCH, id=f"{mode}-by-batch") for mode in MODES)]
BY_MODE += [pytest.param("FULL", BY_SIZE, id="FULL-by-size")]


@pytest.mark.parametrize(("mode", "policy"), BY_MODE)
@pytest.mark.parametrize("runner", RUNNERS)
def test_every_replay_is_of_the_plan_that_the_trace_names(runner, mode, policy, checkpoints, tmp_path):
    trace = tmp_path / "trace.jsonl"
    with graph_engine(checkpoints / "apart", runner, mode, policy, flexquant={"trace": str(trace)}) as llm:
        steps = watch_steps(llm)
        captured = compilation_counter.num_cudagraph_captured
        for batch in BATCHES:
            answers(llm, batch, max_tokens=TOKENS, ignore_eos=True)
        assert compilation_counter.num_cudagraph_captured == captured > 0
    passes = traced(trace)
    check_steps(mode, passes, steps)
    tokens = sum(forward_pass["sequences"] for forward_pass in passes if forward_pass["phase"] == "decode")
    assert tokens == sum(map(len, BATCHES)) * (TOKENS - 1)
    assert len({p["plan"] for p in passes}) == 2


class Step(NamedTuple):
    """What vLLM's engine did in a step."""

    replayed: list[set[str]]
    """The variants whose weights each replayed graph holds."""
    calls: int
    """Calls of the model's forward."""


def watch_steps(llm: Any) -> list[Step]:
    """Return a list that gets every step of the engine from now on."""
    from tests.gpu.software_graphs import SoftwareGraph

    steps: list[Step] = []
    (owners,) = llm.apply_model(own_weights)
    calls = count_calls(llm)
    core = llm.llm_engine.engine_core.engine_core
    run_step = core.step_fn

    def step() -> Any:
        replays, called = len(SoftwareGraph.replays), calls["forward"]
        done = run_step()
        found = [variants_in(graph, owners) for graph in SoftwareGraph.replays[replays:]]
        steps.append(Step(found, calls["forward"] - called))
        return done

    core.step_fn = step
    return steps


def traced(trace: Path) -> list[dict[str, Any]]:
    """Return the passes in a trace, without what it says of policies."""
    return [record for record in records_of(trace) if "phase" in record]


def check_steps(mode: str, passes: list[dict[str, Any]], steps: list[Step]) -> None:
    """Assert that every step replayed the plan that the trace names, in the graphs that its mode has."""
    steps = [step for step in steps if step.replayed or step.calls]  # one is left when all have ended
    assert len(passes) == len(steps)
    for forward_pass, (found, called) in zip(passes, steps, strict=True):
        assert set().union(*found) <= {forward_pass["plan"]}, forward_pass
        is_full = len(found) == 1 and not called
        assert is_full == expects_full(mode, forward_pass), forward_pass
        assert bool(found) == expects_graph(mode, forward_pass), forward_pass


def count_calls(llm: Any) -> Counter[str]:
    """Count the calls of the model's forward from now on."""
    calls: Counter[str] = Counter()

    def count(model: Any) -> None:
        forward = model.forward

        def counted(*args: Any, **options: Any) -> Any:
            calls["forward"] += 1
            return forward(*args, **options)

        model.forward = counted

    llm.apply_model(count)
    return calls


def expects_full(mode: str, forward_pass: dict[str, Any]) -> bool:
    """Return whether vLLM replays a whole pass in this mode."""
    return expects_graph(mode, forward_pass) and (
        mode == "FULL" or (mode != "PIECEWISE" and forward_pass["phase"] == "decode")
    )


def expects_graph(mode: str, forward_pass: dict[str, Any]) -> bool:
    decodes_only = mode == "FULL_DECODE_ONLY" and forward_pass["phase"] != "decode"
    return forward_pass["tokens"] <= max(SIZES) and not decodes_only


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("read", [int, bool, torch.nonzero, lambda x: torch.equal(x, x)])
def test_a_capture_that_reads_from_the_device_raises(read, inference):
    from tests.gpu.software_graphs import SoftwareGraph, capture

    with torch.inference_mode(inference):
        x = torch.ones(1)
        with pytest.raises(RuntimeError, match="reads a value"), capture(SoftwareGraph()):
            read(x.sum())


def test_a_replay_repeats_in_place_what_was_captured():
    from tests.gpu.software_graphs import SoftwareGraph, capture

    x, weight, graph = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), SoftwareGraph()
    with capture(graph):
        y = (x.view(2, 1).to(torch.float64).reshape(-1) * weight).add_(1)
    assert y.tolist() == [4, 9]
    x.copy_(torch.tensor([10.0, 20.0]))
    graph.replay()
    assert y.tolist() == [31, 81]
    assert not graph.operators[0][0].is_view


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
        assert told == asked and told["captures_graphs"]
        assert ("w4a16", "w8a8") in {(row["before"], row["after"]) for row in told["routes"]}
        assert compilation_counter.num_cudagraph_captured > captured
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
        assert told.keys() == {"refused"} and "out of memory" in told["refused"]
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
        assert change(llm, "opposite", OPPOSITE_OF_BY_BATCH)["captures_graphs"] is False
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
        assert change(llm, "opposite", OPPOSITE_OF_BY_BATCH)["captures_graphs"]
        captured = compilation_counter.num_cudagraph_captured
        add(llm, 7, 4)
        step(llm)
        assert compilation_counter.num_cudagraph_captured == captured
    check_steps(mode, traced(trace), steps)
    plans = ["w8a8", *["w4a16"] * 2, *["w8a8"] * 3, "w8a8", *["w4a16"] * 3]
    assert [p["plan"] for p in traced(trace)] == plans
