# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Run a program in a process group of its own, so that it can be stopped with all its children."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

POLL_SECONDS = 0.05


class ProcessGroup:
    """A program that leads its own process group and writes its output to a log; it is thread-safe.

    Only :meth:`stop` reaps the program. Until then the kernel does not reuse its process ID, so a signal to
    the group cannot reach another program.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        with open(log, "w") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        """The program's process ID, which is also the ID of its group and its session."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return the program's exit code, negative if a signal ended it; None while it runs."""
        with self._lock:
            return self._exit_code()

    def stop(self, patience: float = 30) -> None:
        """Send SIGTERM to the group, wait up to ``patience`` seconds, and SIGKILL what is left of it."""
        with self._lock:
            if self._process.returncode is not None:
                return
            os.killpg(self._process.pid, signal.SIGTERM)
            deadline = time.monotonic() + patience
            while self._exit_code() is None and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _exit_code(self) -> int | None:
        if self._process.returncode is not None:
            return self._process.returncode
        found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def end_of_log(log: Path, lines: int) -> str:
    """Return the last lines of a log; an empty text if there is no such file."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    return "\n".join(text.splitlines()[-lines:])
