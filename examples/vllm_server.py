# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Start ``vllm serve`` on loopback, wait until it answers, and stop it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 900


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def vllm_serve(model: str | Path, *args: str, log: str | Path | None = None) -> Iterator[str]:
    """Serve ``model`` and yield the base URL of its OpenAI API; stop the server on leaving.

    The server's output goes to ``log``, or a temporary file. Raises RuntimeError with the end of the log
    if the server ends before it answers.
    """
    port = free_port()
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *args]
    log_path = Path(log or tempfile.mkstemp(suffix=".log", prefix="vllm-serve-")[1])
    # On a CPU vLLM would claim nine tenths of the memory for the KV cache, in GiB here; a GPU ignores it.
    environment = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}
    with open(log_path, "w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}/health", server, log_path)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        try:
            server.wait(timeout=60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def wait_until_healthy(url: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
            raise RuntimeError(f"vllm serve ended with code {server.returncode}:\n{tail}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise RuntimeError(f"vllm serve did not answer within {START_SECONDS} s; its log is {log}")
