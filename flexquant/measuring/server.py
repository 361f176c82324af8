# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Start ``vllm serve`` on the loopback address, wait until it answers, and stop it."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from flexquant.errors import FlexQuantError
from flexquant.measuring.process_group import ProcessGroup, end_of_log

START_SECONDS = 900
LOG_LINES = 40


class ServerError(FlexQuantError):
    """A server exited or did not answer in time; the message holds the end of its log."""


class VLLMServer:
    """A ``vllm serve`` on 127.0.0.1 that runs until :meth:`stop`."""

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
        command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), *arguments]
        self._started = time.monotonic()
        environment = default_environment() if environment is None else environment
        self.processes = ProcessGroup(command, log, environment)

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
        return ServerError(f"vllm serve {problem}; its log ends:\n{end_of_log(self.log, LOG_LINES)}")


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
    """Return a TCP port that is free on 127.0.0.1 at the moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
