# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What decode passes may be told apart by beside their size: how far the last prompt is, and a trigger."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NamedTuple


class Moment(NamedTuple):
    """When a decode pass comes."""

    since_prompt: int
    """Decode passes since the last pass that held a prompt, this one included; 0 in other phases."""
    unsure: bool
    """What the policy's trigger says."""


CALM = Moment(sys.maxsize, False)
"""Long after any prompt, and sure: what holds where nobody follows the passes."""


def count_since_prompt(before: int, phase: str, holds_prompt: bool) -> int:
    """Return ``since_prompt`` of a pass, from that of the pass before it.

    ``holds_prompt``: whether some of its tokens are a prompt's. A decode pass may hold the last token of one,
    the others being in the KV cache; it is the first after that prompt.
    """
    if phase != "decode":
        return 0
    return 1 if holds_prompt else before + 1


class Span(NamedTuple):
    """Moments that a policy does not tell apart."""

    first: int = 1
    """The smallest ``since_prompt``."""
    last: int | None = None
    """The largest; None: there is none."""
    unsure: bool | None = None
    """None: either."""

    @property
    def moment(self) -> Moment:
        """The first of them."""
        return Moment(self.first, bool(self.unsure))

    @property
    def is_calm(self) -> bool:
        """Whether :data:`CALM` is one of them."""
        return self.last is None and not self.unsure

    @property
    def name(self) -> str:
        """In the words of a policy, e.g. ``since_prompt 1-16, unsure``; empty for all moments."""
        parts = []
        if (self.first, self.last) != (1, None):
            end = "+" if self.last is None else f"-{self.last}" if self.last > self.first else ""
            parts.append(f"since_prompt {self.first}{end}")
        if self.unsure is not None:
            parts.append("unsure" if self.unsure else "sure")
        return ", ".join(parts)


def spans(starts: Iterable[int], tells_unsure: bool) -> tuple[Span, ...]:
    """Return all moments, parted where ``since_prompt`` reaches one of ``starts``, which hold 1."""
    cuts = sorted(set(starts))
    lasts = [*(cut - 1 for cut in cuts[1:]), None]
    states = (False, True) if tells_unsure else (None,)
    return tuple(
        Span(first, last, state) for first, last in zip(cuts, lasts, strict=True) for state in states
    )
