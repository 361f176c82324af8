# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The speed benchmarks' order of cells, and the rounds that they add where noise asks for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.speed.kernels import has_stock_w4a8
from benchmarks.speed.models import Model
from benchmarks.speed.results import Results
from benchmarks.speed.rounds import Plan
from benchmarks.speed.servers import ServerOptions
from benchmarks.speed.serving import ServingRun
from benchmarks.speed.shapes import SHAPES
from benchmarks.speed.subjects import parse_subject
from benchmarks.speed.workloads import Workload
from flexquant.evaluation.comparison import Effort

SMALL, LARGE = Workload(1, 8, 4), Workload(8, 8, 4)


def test_rounds_go_forward_and_backward():
    subjects = [parse_subject(name) for name in ("bf16", "w8a8", "flexquant:phase-batch")]
    plan = Plan([SMALL, LARGE], subjects, Effort(2, 2))
    names = [subject.name for subject in subjects]
    assert [(c.round, c.workload, c.subject.name) for c in plan.first] == [
        (number, workload, name)
        for number, order in ((0, names), (1, names[::-1]))
        for workload in (SMALL, LARGE)
        for name in order
    ]


def result(milliseconds: float) -> dict[str, float]:
    """Return the result of a server on which everything takes ``milliseconds``."""
    names = ("median_ttft_ms", "median_tpot_ms")
    return dict.fromkeys(names, milliseconds) | {"output_throughput": 1 / milliseconds}


def steady(number: int) -> float:
    return 1.0


def stalled_once(number: int) -> float:
    return 1.05 if number == 0 else 1.0


def noisy(number: int) -> float:
    return 1.1 if number % 2 else 0.9


@pytest.mark.parametrize(
    ("effort", "small", "large", "rounds"),
    [
        (Effort(6, 12), steady, steady, (6, 6)),
        (Effort(6, 12), steady, noisy, (6, 12)),
        (Effort(6, 12, width=0.5), steady, noisy, (6, 6)),
        # The interval of six rounds is as wide as the stall, 5 %; that of seven ends at half of it.
        (Effort(6, 12), stalled_once, steady, (7, 6)),
        (Effort(2, 2), noisy, noisy, (2, 2)),
    ],
)
def test_a_workload_gets_more_rounds_until_its_ratios_are_narrow_or_the_most_are_measured(
    effort, small, large, rounds
):
    """FlexQuant takes the workload's time in each round; the static subjects take 1."""
    subjects = [parse_subject(name) for name in ("w8a8", "w4a16", "flexquant:phase-batch")]
    times = {SMALL: small, LARGE: large}
    plan = Plan([*times], subjects, effort)
    found = {workload: {subject.name: {} for subject in subjects} for workload in times}

    def take(cells):
        for cell in cells:
            measured = found[cell.workload][cell.subject.name]
            assert cell.round == len(measured)
            time = times[cell.workload] if cell.subject.is_merged else steady
            measured[cell.round] = result(time(cell.round))

    take(plan.first)
    for cells in plan.added(lambda workload: found[workload]):
        take(cells)
    assert tuple(len(found[workload]["w8a8"]) for workload in times) == rounds


def left(folder: Path, rounds: int, times: Callable[[int], float], *more: str) -> int:
    """Return how many cells a run without time leaves if it goes on from ``rounds`` rounds.

    ``more`` names subjects that have no rounds.
    """
    subjects = [parse_subject(name) for name in ("w8a8", "flexquant:phase", *more)]
    plan = Plan([SMALL], subjects, Effort(6, 8))
    model = Model("tiny", SHAPES["tiny"], None, folder / "work")
    options = ServerOptions(64, 8, eager=True, kv_cache_gib=1, memory_share=0.5)
    timeouts = {"deadline": 0.0, "start_timeout": 1.0, "cell_timeout": 1.0}
    results = Results(folder / "results", "tiny", "abc")
    run = ServingRun(model, results, options, folder, on_gpu=False, **timeouts)
    for number in range(rounds):
        for cell in plan.cells(SMALL, number):
            if cell.subject.name not in more:
                time = times if cell.subject.is_merged else steady
                results.save("serving", run._parameters(cell), 1, result=result(time(number)))
    return run.measure(plan)


@pytest.mark.parametrize(
    ("rounds", "times", "cells"),
    [(0, noisy, 12), (5, noisy, 2), (6, noisy, 2), (7, noisy, 2), (8, noisy, 0), (9, noisy, 0)]
    + [(6, steady, 0), (6, stalled_once, 2), (7, stalled_once, 0)],
)
def test_a_run_goes_on_with_the_rounds_that_are_there(tmp_path, rounds, times, cells):
    """The first six rounds in any case; then one at a time, two cells each, until there are eight."""
    assert left(tmp_path, rounds, times) == cells


@pytest.mark.parametrize("subject", ["w4a8", "w4a16"])
def test_a_subject_that_cannot_run_here_is_not_waited_for(tmp_path, subject):
    can_run = subject != "w4a8" or has_stock_w4a8()  # with AMX or zentorch
    assert left(tmp_path, 6, steady, subject) == (6 if can_run else 0)
