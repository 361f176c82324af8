# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What does a part of FlexQuant cost? One process with and without it, in turns, in paired rounds."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from flexquant.measuring.comparison import Effort, compare


def add_effort(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`effort_of` reads."""
    parser.add_argument("--rounds", type=int, default=100, help="at least (%(default)s)")
    parser.add_argument("--max-rounds", type=int, default=400, help="at most (%(default)s)")
    parser.add_argument("--width", type=float, default=0.01, help="of an interval, to stop (%(default)s)")


def effort_of(args: argparse.Namespace) -> Effort:
    return Effort(args.rounds, args.max_rounds, args.width)


def compare_in_turns(
    serve: Callable[[], None], switch: Callable[[bool], None], effort: Effort, turns: int
) -> dict[str, Any]:
    """Time ``serve`` with and without what ``switch`` switches on, in rounds; return the ratio of times.

    In a round each is served ``turns`` times, in turn, since a machine's speed drifts, and the times of each
    are added up. Few turns and many rounds: what disturbs the machine for a moment then spoils few ratios.
    Both are one process's, so that no two processes differ by chance.
    """
    for on in (True, False):
        switch(on)
        serve()
    rounds: list[dict[bool, float]] = []
    ratios: list[float] = []
    while len(rounds) < effort.rounds or (
        len(rounds) < effort.max_rounds and not compare(ratios).is_narrow(effort.width)
    ):
        seconds = {True: 0.0, False: 0.0}
        for turn in range(2 * turns):
            on = (turn + turn // 2 + len(rounds)) % 2 == 0  # on, off, off, on, ...
            switch(on)
            began = time.perf_counter()
            serve()
            seconds[on] += time.perf_counter() - began
        rounds.append(seconds)
        ratios = [times[True] / times[False] for times in rounds]
    found = compare(ratios)
    return {
        "ratio": found.ratio,
        "low": found.low,
        "high": found.high,
        "words": found.words("less time", "more time"),
        "on_seconds": [round(times[True], 4) for times in rounds],
        "off_seconds": [round(times[False], 4) for times in rounds],
    }
