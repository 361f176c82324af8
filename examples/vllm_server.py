# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Start ``vllm serve`` on the loopback address, wait until it answers, and stop it with all its children.

The examples, the benchmarks and the tests start servers so.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from flexquant.errors import FlexQuantError

START_SECONDS = 900
LOG_LINES = 40
POLL_SECONDS = 0.05


class ServerError(FlexQuantError):
    """A server exited or did not answer in time; the message holds the end of its log."""


class VLLMServer:
    """A ``vllm serve`` on 127.0.0.1 that runs until :meth:`stop`."""

    program = "vllm serve"

    def __init__(
        self,
        model: str | Path,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start to serve ``model`` with further ``arguments``; the output goes to the file ``log``.

        ``environment`` is the server's whole environment; None: :func:`default_environment`.
        """
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        """Base URL, without the ``/v1`` of the OpenAI API."""
        self.log = log
        command = [*self.command(str(model), port), *arguments]
        self._started = time.monotonic()
        environment = default_environment() if environment is None else environment
        self.processes = ProcessGroup(command, log, environment)

    def command(self, model: str, port: int) -> list[str]:
        """Return the command that serves ``model`` on a port of 127.0.0.1."""
        serve = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", model]
        return [*serve, "--host", "127.0.0.1", "--port", str(port)]

    def wait_until_healthy(self, timeout: float = START_SECONDS) -> float:
        """Wait for the first answer, and return the seconds since the start.

        Raises :class:`ServerError` if the server exits or does not answer within ``timeout`` seconds.
        """
        while time.monotonic() - self._started < timeout:
            if (code := self.processes.exit_code()) is not None:
                raise self._failure(f"ended with code {code}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return time.monotonic() - self._started
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.25)
        raise self._failure(f"did not answer within {timeout:.0f} s")

    def stop(self) -> None:
        """End the server and every process that it started."""
        self.processes.stop()

    def _failure(self, problem: str) -> ServerError:
        return ServerError(f"{self.program} {problem}; its log ends:\n{end_of_log(self.log, LOG_LINES)}")


@contextmanager
def vllm_serve(model: str | Path, *arguments: str, log: str | Path | None = None) -> Iterator[str]:
    """Serve ``model`` and yield the base URL of its OpenAI API; stop the server on leaving.

    ``arguments`` are arguments of ``vllm serve``. Its output goes to ``log``, or to a temporary file. Raises
    :class:`ServerError`, with the end of the log, if the server exits before it answers or needs more than
    15 minutes.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-serve-") as folder:
        server = VLLMServer(model, arguments, Path(log or Path(folder) / "log"))
        try:
            server.wait_until_healthy()
            yield f"{server.url}/v1"
        finally:
            server.stop()


def default_environment() -> dict[str, str]:
    """Return this process's environment; by default without usage statistics, and 1 GiB of KV cache."""
    # By default vLLM would claim nine tenths of a CPU's memory. A GPU ignores this.
    return {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}


def free_port() -> int:
    """Return a TCP port that is free on 127.0.0.1 at the moment.

    It is below the ports that Linux gives to connections (from 32768 on), so that no connection takes it
    before the server binds it.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32768)
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


class ProcessGroup:
    """A program that leads its own process group and writes its output to a log; it is thread-safe.

    Only :meth:`stop` reaps the program. Until then the kernel does not reuse its process ID, so a signal to
    the group cannot reach another program.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        directory: Path | None = None,
    ) -> None:
        """Start ``command`` in ``directory``, by default the current one."""
        with open(log, "w") as out:
            self._process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=directory,
                start_new_session=True,
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
