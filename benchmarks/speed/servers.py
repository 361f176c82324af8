# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""``vllm serve`` processes: started side by side, kept alive, stopped together; what a started one tells."""

from __future__ import annotations

import os
import re
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.speed.results import ROOT, end_of_log
from benchmarks.speed.subjects import Subject
from examples.vllm_server import LOG_LINES, ServerError, VLLMServer

MODEL_NAME = "model"
CPU_WORKER = "benchmarks.speed.cpu_worker.CPUWorkerWithKernels"
CHOOSING_CPU_WORKER = "benchmarks.speed.cpu_worker.CPUWorkerWithChosenKernels"
CACHE = "vllm:cache_config_info"
FLEXQUANT = re.compile(r"FlexQuant \S+: (policy .*)")
VARIANT_SIZE = re.compile(r"([\w-]+)(?: layers [\d-]+| outside layers)?: ([\d.]+) (bytes|KiB|MiB|GiB)")
GIB = {"bytes": 2**-30, "KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0}


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
    """Share of the GPU's memory for each server."""
    extra: tuple[str, ...] = ()
    """Further arguments of ``vllm serve``."""
    threads: int | None = None
    """Threads of each server's worker on a CPU; None: as many as vLLM takes."""

    @property
    def cpu_threads(self) -> int:
        """Return the threads of a worker; vLLM leaves a core to its front end."""
        return self.threads or max(1, (os.cpu_count() or 1) - 1)

    def describe(self) -> dict[str, Any]:
        """Return what may change speed, for a cell's parameters."""
        found = asdict(self)
        del found["memory_share"], found["kv_cache_gib"]
        if self.threads is None:
            del found["threads"]
        return {**found, "extra": list(self.extra)}

    def engine_arguments(self, subject: Subject, on_gpu: bool) -> list[str]:
        """Return the arguments that tell vLLM how to run the model."""
        arguments = ["--dtype", "bfloat16", "--seed", "0", "--no-enable-prefix-caching"]
        arguments += ["--max-model-len", str(self.max_length), "--max-num-seqs", str(self.max_sequences)]
        arguments += ["--enforce-eager"] if self.eager else []
        if on_gpu:
            arguments += ["--gpu-memory-utilization", f"{self.memory_share:.4f}"]
            if self.kv_cache_gib is not None:
                arguments += ["--kv-cache-memory-bytes", str(int(self.kv_cache_gib * 2**30))]
        elif not subject.is_merged:
            arguments += ["--worker-cls", CPU_WORKER if subject.has_stock_kernels else CHOOSING_CPU_WORKER]
        return [*arguments, *subject.arguments, *(subject.cuda_arguments if on_gpu else ()), *self.extra]

    def environment(self, subject: Subject) -> dict[str, str]:
        """Return the environment of a vLLM process."""
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            # vLLM takes whole GiB on a CPU.
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(self.kv_cache_gib or 1))),
            **os.environ,
            **({"VLLM_CPU_OMP_THREADS_BIND": f"0-{self.threads - 1}"} if self.threads else {}),
            "PYTHONPATH": os.pathsep.join(paths),
            **subject.environment,
        }


class Server(VLLMServer):
    """One running ``vllm serve`` of a subject."""

    def __init__(
        self, subject: Subject, folder: Path, options: ServerOptions, on_gpu: bool, log: Path
    ) -> None:
        self.subject, self.folder = subject, folder
        arguments = ["--served-model-name", MODEL_NAME, *options.engine_arguments(subject, on_gpu)]
        super().__init__(folder, arguments, log, options.environment(subject))

    @property
    def checkpoint_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))

    def wait_until_ready(self, timeout: float) -> dict[str, Any]:
        """Return what the server tells and ``start_seconds``; raise ServerError if it does not start."""
        try:
            seconds = self.wait_until_healthy(timeout)
        except ServerError as e:
            raise ServerError(end_of_log(str(e), lines=LOG_LINES + 1)) from None
        log = self.log.read_text(encoding="utf-8", errors="replace")
        told = {**kv_cache_size(read_metrics(self.url)), **announcement(log)}
        told["process_gib"] = round(own_bytes(self.processes.pid) * GIB["bytes"], 3)
        return {"start_seconds": round(seconds, 2), **told}


def own_bytes(pid: int) -> int:
    """Return the bytes of main memory that a process and its children share with no other process."""
    process = psutil.Process(pid)
    return sum(p.memory_full_info().uss for p in (process, *process.children(recursive=True)))


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


def read_metrics(url: str) -> str:
    """Return the Prometheus metrics of the server at ``url``; raise URLError if there are none."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        return reply.read().decode()


def kv_cache_size(metrics: str) -> dict[str, int]:
    """Return the blocks of the KV cache, their size and the tokens in all; nothing if the server tells none.

    From 0.32 on vLLM tells the tokens itself: as many as the most requests of the greatest length have, each
    in whole blocks. Before, all blocks count.
    """
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == CACHE:
                told = {name: int(text) for name, text in sample.labels.items() if text.isdigit()}
                if {"num_gpu_blocks", "block_size"} <= told.keys():
                    blocks, size = told["num_gpu_blocks"], told["block_size"]
                    tokens = told.get("kv_cache_size_tokens", blocks * size)
                    return {"kv_cache_blocks": blocks, "kv_cache_block_size": size, "kv_cache_tokens": tokens}
    return {}


def announcement(log: str) -> dict[str, Any]:
    """Return what FlexQuant says of itself when it has loaded, and the GiB of each variant's weights."""
    match = FLEXQUANT.search(log)
    if match is None:
        return {}
    sizes: Counter[str] = Counter()
    for name, size, unit in VARIANT_SIZE.findall(match[1].partition("; weights ")[2]):
        sizes[name] += float(size) * GIB[unit]
    return {"flexquant": match[1].strip(), "variant_gib": dict(sizes)}
