# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Define moments, by which a policy tells decode passes of one size apart: distance to a prompt, trigger."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NamedTuple


class Moment(NamedTuple):
    """The moment of a decode pass."""

    since_prompt: int
    """Decode passes since the last pass that held a prompt, this one included; 0 in other phases."""
    unsure: bool
    """Whether the policy's trigger is on."""


CALM = Moment(sys.maxsize, False)
"""Long after any prompt, with the trigger off; used wherever passes are not counted."""


def count_since_prompt(before: int, phase: str, holds_prompt: bool) -> int:
    """Return ``since_prompt`` of a pass, from that of the pass before it.

    ``holds_prompt`` tells whether some of the pass's tokens belong to a prompt. A decode pass can hold the
    last token of a prompt whose other tokens are in the KV cache; it counts as the first after that prompt.
    """
    if phase != "decode":
        return 0
    return 1 if holds_prompt else before + 1


class Span(NamedTuple):
    """A range of moments in which the policy gives every decode pass of one size the same plan."""

    first: int = 1
    """Smallest ``since_prompt``."""
    last: int | None = None
    """Largest ``since_prompt``; None: no upper end."""
    unsure: bool | None = None
    """State of the trigger; None: both."""

    @property
    def moment(self) -> Moment:
        """The first moment of the range."""
        return Moment(self.first, bool(self.unsure))

    @property
    def is_calm(self) -> bool:
        """Whether the range holds :data:`CALM`."""
        return self.last is None and not self.unsure

    @property
    def name(self) -> str:
        """The range in a policy's words, e.g. ``since_prompt 1-16, unsure``; empty for all moments."""
        parts = []
        if (self.first, self.last) != (1, None):
            end = "+" if self.last is None else f"-{self.last}" if self.last > self.first else ""
            parts.append(f"since_prompt {self.first}{end}")
        if self.unsure is not None:
            parts.append("unsure" if self.unsure else "sure")
        return ", ".join(parts)


def spans(starts: Iterable[int], tells_unsure: bool) -> tuple[Span, ...]:
    """Return spans of all moments, cut where ``since_prompt`` reaches one of ``starts``, which include 1."""
    cuts = sorted(set(starts))
    lasts = [*(cut - 1 for cut in cuts[1:]), None]
    states = (False, True) if tells_unsure else (None,)
    return tuple(
        Span(first, last, state) for first, last in zip(cuts, lasts, strict=True) for state in states
    )
