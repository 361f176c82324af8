# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What does a part of FlexQuant cost? One process runs with and without it, in turns, in paired rounds."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flexquant.measuring.comparison import Effort, compare

if TYPE_CHECKING:
    from vllm import LLM

PASSES = 8
"""Decode passes with, and as many without, the measured part in a round."""


def add_effort(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`effort_of` reads: rounds are doubled until the interval is narrow."""
    parser.add_argument("--rounds", type=int, default=400, help="fewest rounds (%(default)s)")
    parser.add_argument("--max-rounds", type=int, default=1600, help="most rounds (%(default)s)")
    parser.add_argument("--width", type=float, default=0.005, help="interval at which to stop (%(default)s)")


def effort_of(args: argparse.Namespace) -> Effort:
    return Effort(args.rounds, args.max_rounds, args.width)


class Decoding:
    """Decodes sequences of an engine in this process, pass by pass; one sequence has the shortest passes."""

    def __init__(self, llm: LLM, sequences: int = 1) -> None:
        self._engine = llm.llm_engine
        self._tokens = llm.model_config.max_model_len - 1
        self._sequences = sequences
        self._requests = 0

    def prefill(self) -> None:
        """Begin the sequences, or the next ones if these have come to their end."""
        from vllm import SamplingParams

        if not self._engine.has_unfinished_requests():
            parameters = SamplingParams(temperature=0, max_tokens=self._tokens, ignore_eos=True)
            for _ in range(self._sequences):
                self._requests += 1
                self._engine.add_request(str(self._requests), {"prompt_token_ids": [100]}, parameters)
            self._engine.step()

    def step(self) -> None:
        """Decode a token of each sequence."""
        self._engine.step()


def compare_in_turns(
    serve: Callable[[], None], switch: Callable[[bool], None], effort: Effort, turns: int
) -> dict[str, Any]:
    """Time ``serve`` with and without what ``switch`` switches on, in rounds; return the ratio of times.

    A round calls ``serve`` ``turns`` times with and as often without it, in turn, and adds up the times of
    each. The shorter ``serve`` is, the less a machine's speed drifts between two calls that are compared; the
    more rounds there are, the fewer of them a short disturbance spoils. One process does both, so that no two
    processes differ by chance.
    """
    for on in (True, False):
        switch(on)
        serve()
    rounds: list[dict[bool, float]] = []
    ratios: list[float] = []
    wanted = effort.rounds
    while len(rounds) < wanted:
        seconds = {True: 0.0, False: 0.0}
        for turn in range(2 * turns):
            on = (turn + turn // 2 + len(rounds)) % 2 == 0  # on, off, off, on, ...
            switch(on)
            began = time.perf_counter()
            serve()
            seconds[on] += time.perf_counter() - began
        rounds.append(seconds)
        ratios.append(seconds[True] / seconds[False])
        if len(rounds) == wanted and not compare(ratios).is_narrow(effort.width):
            wanted = min(2 * wanted, effort.max_rounds)
    found = compare(ratios)
    return {
        "ratio": found.ratio,
        "low": found.low,
        "high": found.high,
        "words": found.words("less time", "more time"),
        "on_seconds": [round(times[True], 4) for times in rounds],
        "off_seconds": [round(times[False], 4) for times in rounds],
    }
