# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""PIECEWISE graphs of policies that tell moments apart: all plans of a size are captured, and replayed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.compilation.counter import compilation_counter

from flexquant.errors import FlexQuantError
from flexquant.policy.trigger import AGGREGATES, SIGNALS, SignalTrigger
from flexquant.serving.worker import trigger_signal
from flexquant.serving.worker.trigger_signal import Signals, signal_of
from tests.gpu.conftest import ON_GPU, RUNNERS, graph_engine
from tests.gpu.test_plans_in_graphs import expected_sizes, sizes_of_pieces, unwrap
from tests.gpu.test_policy_change import change
from tests.gpu.test_replays import BATCHES, TOKENS, check_steps, traced, watch_steps
from tests.integration.conftest import answers
from tests.policies import FLOOR, scheduled, triggered

MODE = "PIECEWISE"


def decode_plans(passes: list[dict[str, Any]]) -> list[str]:
    return [p["plan"] for p in passes if p["phase"] == "decode"]


@pytest.mark.skipif(ON_GPU, reason="CUDA's graphs do not tell what is in them")
@pytest.mark.parametrize("runner", RUNNERS)
def test_every_replay_is_of_the_plan_of_its_moment(runner, checkpoints, tmp_path):
    """The moments follow prompts, and then the pattern of another policy."""
    (tmp_path / "p.yaml").write_text(FLOOR)
    trace = tmp_path / "trace.jsonl"
    options: dict[str, Any] = {"flexquant": {"trace": str(trace)}}
    with graph_engine(checkpoints / "apart", runner, MODE, str(tmp_path / "p.yaml"), **options) as llm:
        pieces, expected = (llm.apply_model(unwrap(f))[0] for f in (sizes_of_pieces, expected_sizes))
        assert pieces == expected
        steps = watch_steps(llm)
        captured = compilation_counter.num_cudagraph_captured
        for batch in BATCHES:
            answers(llm, batch, max_tokens=TOKENS, ignore_eos=True)
        assert not change(llm, "pattern", scheduled("011"))["captures_graphs"]
        for batch in BATCHES:
            answers(llm, batch, max_tokens=TOKENS, ignore_eos=True)
        assert compilation_counter.num_cudagraph_captured == captured > 0
    passes = traced(trace)
    check_steps(MODE, passes, steps)
    floor, pattern = (["w8a8"] * 3 + ["w4a16"] * (TOKENS - 4)), ["w4a16", "w8a8", "w8a8"]
    assert decode_plans(passes) == floor * len(BATCHES) + pattern * ((TOKENS - 1) * len(BATCHES) // 3)


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_signal_decides_between_graphs(runner, checkpoints, tmp_path):
    (tmp_path / "p.yaml").write_text(triggered(enter=0, leave=0))
    trace = tmp_path / "trace.jsonl"
    options: dict[str, Any] = {"flexquant": {"trace": str(trace)}}
    with graph_engine(checkpoints / "apart", runner, MODE, str(tmp_path / "p.yaml"), **options) as llm:
        for batch in BATCHES[:2]:
            answers(llm, batch, max_tokens=TOKENS, ignore_eos=True)
    plans = decode_plans(traced(trace))
    assert plans == ["w4a16"] * 2 + ["w8a8"] * (2 * (TOKENS - 1) - 2)


@pytest.mark.cuda
@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_nobody_waits_for_the_signal_of_a_pass(signal, aggregate, monkeypatch):
    monkeypatch.setattr(trigger_signal, "get_tp_group", lambda: SimpleNamespace(broadcast=lambda x: x))
    trigger = SignalTrigger(signal, aggregate, 1, 1, 1, 0.9 if aggregate == "quantile" else None)
    signals, logits = Signals(trigger), torch.randn(9, 4096).bfloat16()
    on_device = logits.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            signals.begin_pass(True)
            signals.measure(on_device, on_device.device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert list(signals.arrived()) == pytest.approx([float(signal_of(logits, trigger))], rel=1e-4)


@pytest.mark.skipif(ON_GPU, reason="asked of the configuration alone")
@pytest.mark.parametrize("runner", RUNNERS)
def test_full_graphs_are_refused_also_later(runner, checkpoints, tmp_path):
    (tmp_path / "floor.yaml").write_text(FLOOR)
    mode = "FULL_AND_PIECEWISE"
    with (
        pytest.raises(FlexQuantError, match="since_prompt or unsure"),
        graph_engine(checkpoints / "apart", runner, mode, str(tmp_path / "floor.yaml")),
    ):
        pass
    with graph_engine(checkpoints / "apart", runner, mode, "phase") as llm:
        assert "use PIECEWISE" in change(llm, "floor", FLOOR)["refused"]
