# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What another policy would change: the passes that it gives to another plan."""

from __future__ import annotations

from typing import NamedTuple

from flexquant.policy.routes import RouteTable
from flexquant.policy.rules import PHASES, Phase


class RouteChange(NamedTuple):
    """The passes of a phase and of ``min_tokens`` to ``max_tokens`` tokens, both included, and both plans."""

    phase: Phase
    min_tokens: int
    max_tokens: int
    before: str
    after: str


def route_changes(before: RouteTable, after: RouteTable) -> list[RouteChange]:
    """Return the passes whose plan differs between two tables of one model, by phase and token count.

    Both tables have to end at the same token count, as those of one server do. Plans are compared by name.
    """
    changes: list[RouteChange] = []
    for phase in PHASES:
        old, new = before.intervals(phase), after.intervals(phase)
        starts = sorted({row.min_tokens for row in (*old, *new)})
        for first, following in zip(starts, [*starts[1:], old[-1].max_tokens + 1], strict=True):
            plans = before.lookup(phase, first).name, after.lookup(phase, first).name
            if plans[0] == plans[1]:
                continue
            last = changes[-1] if changes else None
            if last and last[:1] + last[3:] == (phase, *plans) and last.max_tokens == first - 1:
                first = changes.pop().min_tokens
            changes.append(RouteChange(phase, first, following - 1, *plans))
    return changes
