# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""``vllm serve`` processes: started side by side, kept alive, stopped together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.speed.results import ROOT, end_of_log
from benchmarks.speed.startup_log import parse_startup_log
from benchmarks.speed.subjects import Subject
from examples.vllm_server import free_port

MODEL_NAME = "model"
CPU_WORKER = "benchmarks.speed.cpu_worker.CPUWorkerWithKernels"


class ServerError(Exception):
    """A server ended or did not answer in time; the message has the end of its log."""


@dataclass(frozen=True)
class ServerOptions:
    """How every subject of a run is served."""

    max_length: int
    """Most tokens of a sequence, prompt and answer."""
    max_sequences: int
    """Most sequences in a batch."""
    eager: bool
    kv_cache_gib: float | None
    """Size of each KV cache, GiB; None: what is left of ``memory_share`` (GPU)."""
    memory_share: float
    """Part of the GPU's memory for each server."""
    extra: tuple[str, ...] = ()
    """More arguments of ``vllm serve``."""

    def describe(self) -> dict[str, Any]:
        """Return what may change speed, for a cell's parameters."""
        found = asdict(self)
        del found["memory_share"], found["kv_cache_gib"]
        return {**found, "extra": list(self.extra)}

    def engine_arguments(self, subject: Subject, on_gpu: bool) -> list[str]:
        """Return the arguments that ``vllm serve``, ``bench latency`` and ``bench throughput`` share."""
        arguments = ["--dtype", "bfloat16", "--seed", "0", "--no-enable-prefix-caching"]
        arguments += ["--max-model-len", str(self.max_length), "--max-num-seqs", str(self.max_sequences)]
        arguments += ["--enforce-eager"] if self.eager else []
        if on_gpu:
            arguments += ["--gpu-memory-utilization", f"{self.memory_share:.4f}"]
            if self.kv_cache_gib is not None:
                arguments += ["--kv-cache-memory-bytes", str(int(self.kv_cache_gib * 2**30))]
        elif not subject.is_merged:
            arguments += ["--worker-cls", CPU_WORKER]
        return [*arguments, *subject.arguments, *self.extra]

    def environment(self, subject: Subject) -> dict[str, str]:
        """Return the environment of a vLLM process."""
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            # On a CPU, whole GiB; and threads that spin while they wait would slow the server under load.
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(self.kv_cache_gib or 1))),
            "OMP_WAIT_POLICY": "PASSIVE",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            **subject.environment,
        }


class Server:
    """One running ``vllm serve``."""

    def __init__(
        self, subject: Subject, folder: Path, options: ServerOptions, on_gpu: bool, log: Path
    ) -> None:
        self.subject, self.folder, self.log = subject, folder, log
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL_NAME]
        command += options.engine_arguments(subject, on_gpu)
        self._started = time.monotonic()
        with open(log, "w") as out:
            self._process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=options.environment(subject),
                start_new_session=True,
            )

    def wait_until_ready(self, timeout: float) -> dict[str, Any]:
        """Return what the start-up log says and ``start_seconds``; raise ServerError if it fails."""
        while time.monotonic() - self._started < timeout:
            if self._process.poll() is not None:
                raise ServerError(f"ended with code {self._process.returncode}; {self._log_end()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    seconds = round(time.monotonic() - self._started, 2)
                    return {"start_seconds": seconds, **parse_startup_log(self._read_log())}
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.25)
        raise ServerError(f"did not answer within {timeout:.0f} s; {self._log_end()}")

    def stop(self) -> None:
        """End the server and every process it started."""
        for signal_number, patience in ((signal.SIGTERM, 30), (signal.SIGKILL, 10)):
            try:
                os.killpg(self._process.pid, signal_number)
                self._process.wait(patience)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue

    def _read_log(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def _log_end(self) -> str:
        return f"its log ends:\n{end_of_log(self._read_log())}"


class ServerPool:
    """Servers side by side; all are stopped on leaving, also the ones still starting."""

    def __init__(self, together: int, timeout: float) -> None:
        """Start ``together`` servers at a time, each within ``timeout`` seconds."""
        self._together, self._timeout = together, timeout
        self._servers: list[Server] = []

    def __enter__(self) -> ServerPool:
        return self

    def __exit__(self, *error: object) -> None:
        with ThreadPoolExecutor(max(1, len(self._servers))) as pool:
            list(pool.map(Server.stop, self._servers))

    def start(
        self, makers: Mapping[str, Callable[[], Server]]
    ) -> Iterator[tuple[str, Server | None, dict[str, Any] | ServerError]]:
        """Yield, in order, each name with its server and what its start-up told, or None and its error."""

        def start(make: Callable[[], Server]) -> tuple[Server | None, dict[str, Any] | ServerError]:
            server = make()
            self._servers.append(server)
            try:
                return server, server.wait_until_ready(self._timeout)
            except ServerError as e:
                server.stop()
                return None, e

        pool = ThreadPoolExecutor(self._together)
        try:
            for name, (server, told) in zip(makers, pool.map(start, makers.values()), strict=True):
                yield name, server, told
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            self.__exit__()
            raise
        finally:
            pool.shutdown()
