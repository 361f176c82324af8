# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The clock of a simulation: pass after pass until every request of the trace is served."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from flexquant.router import Phase
from flexquant.routes import RouteTable
from flexquant.simulation.pass_cost import PassCost
from flexquant.simulation.scheduler import Batch, Limits, Scheduler, Sequence
from flexquant.simulation.trace import Request


class TimedPass(NamedTuple):
    """One forward pass."""

    start: float
    """Seconds on the trace's clock."""
    seconds: float
    phase: Phase
    plan: str
    tokens: int
    """Without padding."""
    sequences: int


@dataclass(frozen=True)
class Replay:
    """What happened to a trace."""

    passes: list[TimedPass]
    """In order; they do not overlap."""
    sequences: list[Sequence]
    """Served, in the order of the trace."""
    gaps: array[float]
    """Seconds between any two consecutive tokens of a request, of all requests."""


def replay(trace: list[Request], table: RouteTable, cost: PassCost, limits: Limits) -> Replay:
    """Serve a trace; a pass begins when the one before has ended, with the requests that are there by then.

    What a server does between passes, and a client around them, takes no time unless the times of passes
    include it. Raises FlexQuantError for a request that the KV cache cannot hold.
    """
    for number, request in enumerate(trace, 1):
        limits.check_fits(request, number)
    scheduler = Scheduler(limits)
    sequences = [Sequence(request) for request in trace]
    coming = deque(sequences)
    passes: list[TimedPass] = []
    gaps = array("d")
    now = 0.0
    while True:
        while coming and coming[0].request.arrival <= now:
            scheduler.waiting.append(coming.popleft())
        batch = scheduler.schedule()
        if not batch:
            if not coming:
                return Replay(passes, sequences, gaps)
            now = coming[0].request.arrival
            continue
        phase = phase_of(batch)
        tokens = sum(tokens for _, tokens, _ in batch)
        padded = limits.padded(tokens)
        plan = table.lookup(phase, padded)
        seconds = cost.seconds(plan, phase, batch, padded)
        passes.append(TimedPass(now, seconds, phase, plan.name, tokens, len(batch)))
        now += seconds
        for sequence in scheduler.complete(batch):
            if sequence.generated == 1:
                sequence.first_token = now
            else:
                gaps.append(now - sequence.last_token)
            sequence.last_token = now


def phase_of(batch: Batch) -> Phase:
    """Return what a pass holds, as :func:`flexquant.router.read_pass` tells it: by tokens of a sequence."""
    lengths = {tokens for _, tokens, _ in batch}
    if lengths == {1}:
        return "decode"
    return "mixed" if 1 in lengths else "prefill"
