# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What is replayed, read from the operators that software graphs repeat: in every step the policy's plan."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_leaves
from vllm.compilation.counter import compilation_counter

from tests.gpu.conftest import ON_GPU, RUNNERS, SIZES, graph_engine
from tests.gpu.test_plans_in_graphs import BY_BATCH, BY_SIZE, MODES
from tests.integration.conftest import answers, records_of

pytestmark = pytest.mark.skipif(ON_GPU, reason="CUDA's graphs do not tell what is in them")

BATCHES = [["one"], [f"{i} of three" for i in range(3)], [f"{i} of seven" for i in range(7)]]
TOKENS = 6


def own_weights(model: Any) -> dict[int, str]:
    """Return the variant of every weight that only one variant has, keyed by the weight's address."""
    owners: dict[int, set[str]] = {}
    for name, variant in model.variants.items():
        for weight in variant.parameters():
            if weight.numel():
                owners.setdefault(weight.data_ptr(), set()).add(name)
    return {address: next(iter(names)) for address, names in owners.items() if len(names) == 1}


def variants_in(graph: Any, owners: dict[int, str]) -> set[str]:
    """Return the variants whose weights the operators of a graph read."""
    tensors = (
        t for operator in graph.operators for t in tree_leaves(operator[1:3]) if isinstance(t, torch.Tensor)
    )
    return {owners[t.data_ptr()] for t in tensors if t.data_ptr() in owners}


@pytest.mark.parametrize(
    ("mode", "policy"),
    [
        *(pytest.param(mode, BY_BATCH, id=f"{mode}-by-batch") for mode in MODES),
        pytest.param("FULL", BY_SIZE, id="FULL-by-size"),
    ],
)
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
