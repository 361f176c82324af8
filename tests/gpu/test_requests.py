# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Requests that have not ended are remembered, as both of vLLM's runners tell them."""

from __future__ import annotations

from typing import Any

import pytest

from flexquant.serving.worker import request_plans
from tests.gpu.conftest import RUNNERS, graph_engine
from tests.gpu.test_policy_change import add, step


def tokens(llm: Any, request: str) -> list[int]:
    """Return the tokens that the engine reports for a request; nothing if it does not know the request."""
    (found,) = llm.collective_rpc("flexquant_requests", args=(request,))
    assert not any("incomplete" in told for told in found)
    return [sum(run["tokens"] for run in told["plans"]) for told in found]


@pytest.mark.parametrize("runner", RUNNERS)
def test_requests_under_way_are_not_forgotten(runner, checkpoints, monkeypatch):
    monkeypatch.setattr(request_plans, "KEPT", 2)
    with graph_engine(checkpoints / "merged", runner, None, "phase") as llm:
        llm.collective_rpc("flexquant_follow_requests")
        add(llm, 4, 6)
        step(llm, 4)
        told = [tokens(llm, f"6-{number}") for number in range(4)]
        prompt = len(llm.get_tokenizer().encode("0 of several"))
        assert told == [[prompt + 3]] * 4
        step(llm)
        add(llm, 1, 5)
        step(llm)
        assert [tokens(llm, name) for name in ("6-0", "6-1", "6-2")] == [[]] * 3
        assert [tokens(llm, name) for name in ("6-3", "5-0")] == [[prompt + 5], [prompt + 4]]
