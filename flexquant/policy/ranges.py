# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Represent the ranges in a policy: ranges of sizes of passes, and of decoder layers with their variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Bounds:
    """A range of whole numbers, both ends included; ``max`` None means no upper end."""

    min: int = 1
    max: int | None = None

    def __contains__(self, number: int) -> bool:
        return self.min <= number and (self.max is None or number <= self.max)

    def starts(self, unit: int = 1) -> set[int]:
        """Return the first number in the range and the first above it, both in units of 1 / ``unit``."""
        first = (self.min - 1) * unit + 1
        return {first} if self.max is None else {first, self.max * unit + 1}


def are_covered(ranges: Sequence[Bounds], others: Sequence[Sequence[Bounds]]) -> bool:
    """Whether the union of ``others`` covers a box; boxes are given by their range in each dimension.

    Only points at which the box or another box begins, or just above an end, need a test: if the union misses
    a point, it misses one of these.
    """
    if not ranges or not others:
        return bool(others)
    first, *rest = ranges
    starts = {first.min} | {start for other in others for start in other[0].starts() if start in first}
    return all(are_covered(rest, [other[1:] for other in others if start in other[0]]) for start in starts)


@dataclass(frozen=True)
class LayerRange:
    """The variant of layers ``first`` to ``last``, both included; negative ones count from the end."""

    first: int
    last: int
    variant: str
    text: str
    """The range as written in the policy."""
    place: str = field(compare=False)
    """File, line and key, for messages."""
