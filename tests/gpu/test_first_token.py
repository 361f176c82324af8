# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The benchmark of the first token exchanges what it says, and finds a delay that is planted in one mode."""

import time
from typing import Any

import pytest

from benchmarks.proof.first_token import ALL, MODES, VLLM, Exchange, Requests, difference, exchange_by_request
from tests.gpu.conftest import ON_GPU, RUNNERS, graph_engine

pytestmark = [] if ON_GPU else pytest.mark.full
TOKENS = 12
ROUNDS = {"V1": 40, "V2": 12}
DELAY = {"V1": 0.001, "V2": 0.02}
"""Seconds by runner: those of V2 in Triton's interpreter are noise of several milliseconds."""
LATE = "all, but late"


def be_busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_planted_delay_is_found_and_the_modes_are_what_they_say(runner: str, checkpoints: Any) -> None:
    with graph_engine(checkpoints / "merged", runner, "FULL_AND_PIECEWISE", "w8a8") as llm:
        take = Exchange(llm, "w8a8").take
        (model,) = llm.apply_model(lambda model: getattr(model, "runnable", model))
        began = model.observer._began

        def take_or_delay(mode: str) -> None:
            take(ALL if mode == LATE else mode)
            model.observer._began = (lambda: be_busy(DELAY[runner]) or began()) if mode == LATE else began

        requests = Requests(llm, TOKENS)
        times = exchange_by_request(requests, take_or_delay, (ALL, LATE, VLLM), ROUNDS[runner])
        counted = {mode: passes_counted(model, requests, take, mode) for mode in MODES}
    found = difference(times[LATE], times[ALL], "first_cpu")
    assert 0 < found["low"] <= found["ms"] <= found["high"], found
    assert difference(times[LATE], times[VLLM], "first_cpu")["low"] > 0
    assert counted == {ALL: (3, True), VLLM: (0, False)}


def passes_counted(model: Any, requests: Requests, take: Any, mode: str) -> tuple[float, bool]:
    """Return how many passes FlexQuant counts of a request for three tokens, and whether it times them."""

    def told() -> tuple[float, float]:
        cells = model.records.counted() or []
        return tuple(sum(cell[name] for cell in cells) for name in ("forward", "forward_seconds"))

    take(ALL)
    before = told()
    take(mode)
    requests.send(3)
    take(ALL)
    after = told()
    return after[0] - before[0], after[1] > before[1]
