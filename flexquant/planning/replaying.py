# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Run a simulation's clock, pass after pass until every request of the trace is served."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from flexquant.planning.pass_cost import PassCost
from flexquant.planning.scheduler import Batch, Scheduler, Sequence
from flexquant.planning.server import Limits
from flexquant.planning.trace import Request
from flexquant.policy.routes import RouteTable
from flexquant.policy.schema import Phase


class TimedPass(NamedTuple):
    """One forward pass."""

    start: float
    """Seconds on the trace's clock."""
    seconds: float
    phase: Phase
    plan: str
    tokens: int
    """Tokens without padding."""
    sequences: int


@dataclass(frozen=True)
class Replay:
    """Result of replaying a trace."""

    passes: list[TimedPass]
    """All passes in order; they do not overlap."""
    sequences: list[Sequence]
    """The served requests, in the order of the trace."""
    gaps: array[float]
    """Seconds between consecutive tokens of a request, for all requests."""


def replay(trace: list[Request], table: RouteTable, cost: PassCost, limits: Limits) -> Replay:
    """Serve a trace; a pass begins when the pass before has ended.

    A pass can hold the requests that have arrived by then; with asynchronous scheduling, those that had
    arrived when the pass before began. The server's work between passes and the client's work take no time,
    unless the times of passes include them. Raises FlexQuantError for a request that the KV cache cannot
    hold.
    """
    for number, request in enumerate(trace, 1):
        limits.check_fits(request, number)
    scheduler = Scheduler(limits)
    sequences = [Sequence(request) for request in trace]
    coming = deque(sequences)
    in_flight: deque[tuple[Batch, float]] = deque()  # with the time at which it ends
    passes: list[TimedPass] = []
    gaps = array("d")
    now = 0.0
    while True:
        while coming and coming[0].request.arrival <= now:
            scheduler.waiting.append(coming.popleft())
        batch = scheduler.schedule()
        if batch:
            start = in_flight[-1][1] if in_flight else now
            passes.append(_timed(batch, start, table, cost, limits))
            in_flight.append((batch, passes[-1].start + passes[-1].seconds))
            if len(in_flight) < limits.passes_in_flight:
                continue
        elif not in_flight:
            if not coming:
                return Replay(passes, sequences, gaps)
            now = coming[0].request.arrival
            continue
        ended, now = in_flight.popleft()
        for sequence in scheduler.complete(ended):
            if sequence.generated == 1:
                sequence.first_token = now
            else:
                gaps.append(now - sequence.last_token)
            sequence.last_token = now


def _timed(batch: Batch, start: float, table: RouteTable, cost: PassCost, limits: Limits) -> TimedPass:
    phase = phase_of(batch)
    tokens = sum(chunk.tokens for chunk in batch)
    padded = limits.padded(tokens)
    plan = table.lookup(phase, padded)
    return TimedPass(start, cost.seconds(plan, phase, batch, padded), phase, plan.name, tokens, len(batch))


def phase_of(batch: Batch) -> Phase:
    """Return the phase by its tokens per sequence, as :mod:`~flexquant.serving.worker.forward_pass` does."""
    lengths = {chunk.tokens for chunk in batch}
    if lengths == {1}:
        return "decode"
    return "mixed" if 1 in lengths else "prefill"
