# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Kills a command at random moments, looks at what it left, and runs the same command to its end.

It may leave a checkpoint as it was, whole, or not at all. What begins with a dot is out of sight: no command
and no server reads it.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests import programs
from tests.quantize.quantizing import digests

SECONDS = 900
"""Seconds that a command gets to end, however busy the machine is."""
ATTEMPTS = 4
"""Attempts for each kill: a command that ended before its moment came does not count."""

Digests = dict[str, str]
"""Path of a file -> its SHA-256."""


class Command:
    """A ``flexquant`` command in a session of its own, with its temporary files beside the output folder."""

    def __init__(self, arguments: Sequence[str], output: Path) -> None:
        self.log = output.with_name("log")
        (temporary := output.with_name("temporary")).mkdir(exist_ok=True)
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flexquant", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                # With several threads, sums may differ from run to run.
                env={**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        names = {*output.rglob("*")}
        while self.process.poll() is None and names == {*output.rglob("*")}:
            time.sleep(0.005)
        self.writes_since = time.monotonic()
        """When the command began to write: before, it has only imported and read."""

    def succeed(self) -> float:
        """Wait for the end; return the seconds that the command wrote for."""
        assert self.process.wait(SECONDS) == 0, self.log.read_text()
        return time.monotonic() - self.writes_since

    def kill(self) -> None:
        """Kill the process group and wait until nothing of its session is left."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + SECONDS
        while left := programs.session(self.process.pid):
            assert time.monotonic() < deadline, f"{left} outlive the command that started them"
            time.sleep(0.05)


def kill_often(
    command: Callable[[Path], list[str]],
    folder: Path,
    times: int,
    prepare: Callable[[Path], object] = Path.exists,
) -> None:
    """Kill a command ``times``, while it writes, each time into a new folder below ``folder``.

    ``command`` returns the arguments for an output folder, and ``prepare`` puts there what is there before.
    Raises AssertionError where something half done is left, or the same command does not finish it.
    """
    moments, killed = random.Random(0), 0
    output = new_output(folder / "undisturbed", prepare)
    before = digests(output)
    seconds = Command(command(output), output).succeed()
    expected = digests(output)
    assert expected != before, "the command writes nothing"
    for attempt in range(times * ATTEMPTS):
        if killed == times:
            break
        output = new_output(folder / str(attempt), prepare)
        started = Command(command(output), output)
        time.sleep(moments.uniform(0, seconds))
        if started.process.poll() is None:
            started.kill()
            killed += 1
            check_left(digests(output), before, expected)
            Command(command(output), output).succeed()
            assert digests(output) == expected, f"not as undisturbed: {output}"
        shutil.rmtree(output.parent)
    assert killed == times, f"only {killed} of {times} came before the command had ended"


def new_output(folder: Path, prepare: Callable[[Path], object]) -> Path:
    output = folder / "output"
    output.mkdir(parents=True)
    prepare(output)
    return output


def check_left(left: Digests, before: Digests, expected: Digests) -> None:
    """Raise AssertionError where a checkpoint, or a file outside of one, is neither old nor whole."""

    def unit(name: str) -> str:
        parent = str(Path(name).parent)
        return parent if f"{parent}/config.json" in {**before, **expected} else name

    def of(digests: Digests, wanted: str) -> Digests:
        return {name: digest for name, digest in digests.items() if unit(name) == wanted}

    in_sight = [name for name in left if not any(part.startswith(".") for part in Path(name).parts)]
    for found in {unit(name) for name in in_sight}:
        assert of(left, found) in (of(before, found), of(expected, found)), f"{found} is half done"
