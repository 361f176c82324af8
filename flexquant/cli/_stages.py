# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Print one line on stderr for each stage of a long command: its number, what it does, and its seconds."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

SHOWN_EVERY = 0.1
"""Seconds between two updates of a line on a terminal."""
CLEAR_TO_END = "\x1b[K"


class Stages:
    """Prints the stages of one command, ``[2/5] w8a8: ... 74 s``, on what is stderr when it is constructed.

    On a terminal the running stage's line shows its progress. In a file or pipe the line is written in two
    parts, when the stage begins and when it ends. Notes are printed when the stage has ended.
    """

    def __init__(self, total: int) -> None:
        self._stream: TextIO = sys.stderr
        self._total = total
        self._begun = 0
        self._running = False
        self._notes: list[str] = []

    def note(self, message: str) -> None:
        """Print a line of its own, after the running stage's line."""
        self._notes.append(message)
        if not self._running:
            self._print_notes()

    @contextmanager
    def stage(self, title: str, *, unit: str = "") -> Iterator[Callable[[int, int], None]]:
        """Begin the next stage; yield a function of (done, total), counted in ``unit`` or as a percentage.

        The stage ends with the block; if the block raises, its line has no seconds.
        """
        self._begun += 1
        line = f"[{self._begun}/{self._total}] {title} ..."
        is_terminal = self._stream.isatty()
        started = shown = time.monotonic()
        self._write(line)
        self._running = True

        def show(done: int, total: int) -> None:
            nonlocal shown
            now = time.monotonic()
            if is_terminal and now - shown >= SHOWN_EVERY:
                shown = now
                state = f"{done} of {total}{unit}" if unit else f"{done / max(total, 1):.0%}"
                text = f"{line} {state}, {now - started:.0f} s"
                self._write(f"\r{text[: shutil.get_terminal_size().columns - 1]}{CLEAR_TO_END}")

        try:
            yield show
            seconds = time.monotonic() - started
            took = f" {seconds:.{0 if seconds >= 10 else 1}f} s"
            self._write(f"\r{line}{took}{CLEAR_TO_END}" if is_terminal else took)
        finally:
            self._write("\n")
            self._running = False
            self._print_notes()

    def _print_notes(self) -> None:
        for note in self._notes:
            self._write(f"{note}\n")
        self._notes.clear()

    def _write(self, text: str) -> None:
        print(text, end="", file=self._stream, flush=True)
