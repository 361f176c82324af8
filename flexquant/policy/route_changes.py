# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Find the passes to which another policy would give another plan."""

from __future__ import annotations

from typing import NamedTuple

from flexquant.checkpoint.model_config import JsonObject
from flexquant.policy.moments import Span, spans
from flexquant.policy.routes import RouteTable
from flexquant.policy.schema import PHASES, Phase


class RouteChange(NamedTuple):
    """A phase's passes of ``min_tokens`` to ``max_tokens`` tokens, ends included, and their plans."""

    phase: Phase
    min_tokens: int
    max_tokens: int
    before: str
    after: str
    moment: str = ""
    """Name of the passes' :class:`~flexquant.policy.moments.Span`; empty for all moments."""

    def to_data(self) -> JsonObject:
        """Return JSON-able data, without ``moment`` if it is empty."""
        data = self._asdict()
        return data if self.moment else {key: data[key] for key in self._fields if key != "moment"}


def route_changes(before: RouteTable, after: RouteTable) -> list[RouteChange]:
    """Return the passes whose plan differs between two tables of one model, by phase, moment and token count.

    Both tables have to end at the same token count, like the tables of one server. Plans are compared by
    name.
    """
    changes: list[RouteChange] = []
    for phase in PHASES:
        told = [*before.spans(phase), *after.spans(phase)]
        for span in spans({span.first for span in told}, any(span.unsure is not None for span in told)):
            changes += _changes(before, after, phase, span)
    return changes


def _changes(before: RouteTable, after: RouteTable, phase: Phase, span: Span) -> list[RouteChange]:
    changes: list[RouteChange] = []
    old, new = before.intervals(phase, span.moment), after.intervals(phase, span.moment)
    starts = sorted({row.min_tokens for row in (*old, *new)})
    for first, following in zip(starts, [*starts[1:], old[-1].max_tokens + 1], strict=True):
        plans = (
            before.lookup(phase, first, span.moment).name,
            after.lookup(phase, first, span.moment).name,
        )
        if plans[0] == plans[1]:
            continue
        if changes and (*changes[-1][3:5], changes[-1].max_tokens) == (*plans, first - 1):
            first = changes.pop().min_tokens
        changes.append(RouteChange(phase, first, following - 1, *plans, span.name))
    return changes
