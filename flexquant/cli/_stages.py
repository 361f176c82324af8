# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Print on stderr when each stage of a long command begins, and how many seconds it took."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm


class Stages:
    """Prints a command's stages, ``[2/5] w8a8: ...``, on stderr, and on a terminal the progress of one."""

    def __init__(self, total: int) -> None:
        self._stream: TextIO = sys.stderr
        self._total = total
        self._begun = 0

    def note(self, message: str) -> None:
        """Print a line of its own."""
        tqdm.write(message, file=self._stream)
        self._stream.flush()

    @contextmanager
    def stage(self, title: str, *, unit: str = "") -> Iterator[Callable[[int, int], None]]:
        """Begin the next stage; yield a function of (done, total), counted in ``unit`` or as a percentage."""
        self._begun += 1
        line = f"[{self._begun}/{self._total}] {title} ..."
        self.note(line)
        started = time.monotonic()
        form = f"{{n_fmt}} of {{total_fmt}}{unit}" if unit else "{percentage:.0f}%"
        form = f"{{desc}} {form}, {{elapsed}}"
        with tqdm(desc=line, bar_format=form, file=self._stream, disable=None, leave=False) as bar:

            def show(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            yield show
        seconds = time.monotonic() - started
        self.note(f"{line} {seconds:.{0 if seconds >= 10 else 1}f} s")
