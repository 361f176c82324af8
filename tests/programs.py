# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Starts programs for tests, in a chosen environment and bounded in time, and shows what failed ones said."""

import os
import resource
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from flexquant import cli

ROOT = Path(__file__).parents[1]
PATIENCE = 30
"""Seconds that an interrupted program gets to end."""
SHOWN = 3000
"""Characters of the end of each stream that a failure shows."""


def newcomers_environment() -> dict[str, str]:
    """Return this process's environment without what the tests set for their own engines.

    The KV cache's size stays: a CPU's default is half of the memory, and takes seconds to fill.
    """
    ours = ("VLLM_", "OMP_", "HF_HUB_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    return kept | {"VLLM_CPU_KVCACHE_SPACE": "1"}


def run(
    command: Sequence[object],
    *,
    timeout: float,
    status: int | None = 0,
    environment: Mapping[str, str] | None = None,
    folder: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """Run a program in ``folder``; fail, with what it printed, unless it ends in time and with ``status``.

    ``timeout`` is in seconds, ``status`` an exit code or None for any, and ``environment`` all of the
    program's or None for this process's.
    """
    __tracebackhide__ = True
    arguments = [str(part) for part in command]
    problem = ""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(arguments, cwd=folder, env=environment, stdout=stdout, stderr=stderr)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            problem = f"did not end within {timeout} s"
            process.send_signal(signal.SIGINT)  # so that it can end the servers that it has started
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
        finally:
            process.kill()
            process.wait()
        printed = []
        for stream in (stdout, stderr):
            stream.seek(0)
            printed.append(stream.read().decode(errors="replace"))
    if not problem and status not in (None, process.returncode):
        problem = f"ended with {process.returncode} instead of {status}"
    if problem:
        shown = "stdout:\n{}\nstderr:\n{}".format(*(text[-SHOWN:] for text in printed))
        pytest.fail(f"{shlex.join(arguments)} {problem}\n{shown}")
    return subprocess.CompletedProcess(arguments, process.returncode, *printed)


@contextmanager
def small_files(most: int) -> Iterator[None]:
    """Let this process write no file beyond ``most`` bytes: what does not fit is refused, as on a full disk.

    The error is EFBIG instead of a full disk's ENOSPC.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def disk_full(command: Sequence[str], most: int, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a ``flexquant`` command with files of at most ``most`` bytes; return the sentence it fails with."""
    with small_files(most):
        assert cli.main(command) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said.splitlines()[-1]


def is_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def session(leader: int) -> list[int]:
    """Return the running processes, zombies left out, of the session that ``leader`` began."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                state, _, _, number = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(number) == leader and state != "Z":
                    found.append(int(entry.name))
    return found
