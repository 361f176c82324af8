# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A ``flexquant`` command in a session of its own, which can be killed with all that it started."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from flexquant import cli
from tests import programs

SECONDS = 900
"""Seconds that a command gets to end, however busy the machine is."""


class Started:
    """A command that runs, its output in a log and its temporary files in a folder.

    With ``libraries`` it is forked from a process that has imported those and done nothing else, so that it
    is at work from its first moment; without, it is a program of its own, as a user starts it.
    """

    def __init__(
        self, arguments: Sequence[str], log: Path, temporary: Path, libraries: Sequence[str]
    ) -> None:
        temporary.mkdir(exist_ok=True)
        self.log = log
        self._process: multiprocessing.process.BaseProcess | subprocess.Popen[bytes]
        if libraries:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["tests.interruptions.started", *libraries])
            self._process = context.Process(target=_run, args=(list(arguments), str(log), str(temporary)))
            self._process.start()
        else:
            command = [sys.executable, "-m", "flexquant", *arguments]
            with open(log, "wb") as out:
                self._process = subprocess.Popen(
                    command,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "TMPDIR": str(temporary)},
                    start_new_session=True,
                )
        assert self._process.pid is not None
        self._pid = self._process.pid

    def wait(self, seconds: float) -> int | None:
        """Return the exit status; None if the command still runs after so many seconds."""
        if not isinstance(self._process, subprocess.Popen):
            self._process.join(seconds)
            return self._process.exitcode
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Stop the command for as long as the block runs."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process group, if the command still runs; wait until nothing of its session is left.

        Raises AssertionError if something outlives it: a process that left the group has to notice the end
        itself.
        """
        if self.wait(0) is None:
            self._signal(signal.SIGKILL)
            self.wait(SECONDS)
        deadline = time.monotonic() + SECONDS
        while left := programs.session(self._pid):
            assert time.monotonic() < deadline, f"{left} outlive the command that started them"
            time.sleep(0.05)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # a process forked this moment has no group yet
            os.killpg(self._pid, number)
        with suppress(ProcessLookupError):
            os.kill(self._pid, number)


def _run(arguments: list[str], log: str, temporary: str) -> None:
    """Run the command in the forked process."""
    os.setsid()
    os.environ["TMPDIR"] = temporary
    tempfile.tempdir = None  # imports have found another folder
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.exit(cli.main(arguments))
