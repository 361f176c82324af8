# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Count passes, tokens and seconds of every plan and phase, for the ``/metrics`` of vLLM's API server.

A worker counts, since it sees every pass, even one that vLLM replays from a FULL graph. A worker is a process
of its own, so it counts in files of prometheus_client's multiprocess mode, which hold the values in shared
memory. ``/metrics`` reads them from there: with one API server through a collector beside vLLM's own metrics,
with several through vLLM itself, which then keeps its own metrics in such files too. One worker of an engine
counts, since all workers run the same passes.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import struct
import tempfile
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from prometheus_client import REGISTRY
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.utils import floatToGoString
from vllm.config import CUDAGraphMode
from vllm.logger import init_logger

from flexquant.checkpoint.weight_bytes import BytesByRange
from flexquant.errors import FlexQuantError
from flexquant.serving.metric_names import (
    FORWARD,
    HELP,
    PADDED_TOKENS,
    POLICY,
    REPLAYS,
    SECONDS,
    SIZE,
    SIZE_BUCKETS,
    TOKENS,
    WEIGHT_BYTES,
)
from flexquant.serving.worker.forward_pass import Pass
from flexquant.serving.worker.pass_times import PassClock

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.flexquant.metrics")

FOLDER = "FLEXQUANT_METRICS_DIR"
"""Environment variable with the folder of the files; the front end sets it, and workers inherit it."""
OF_SEVERAL_SERVERS = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client's environment variable, which vLLM sets if it starts several API servers."""

_own_folder: tempfile.TemporaryDirectory[str] | None = None
_collector: MultiProcessCollector | None = None


def offer_metrics() -> None:
    """In the front end: show the counters of the workers that it will start on its ``/metrics``.

    An API server that vLLM's front end starts as a child shares the front end's folder. A separate program
    makes a folder of its own, even if it inherits the variable.
    """
    global _own_folder, _collector
    if OF_SEVERAL_SERVERS in os.environ:
        os.environ[FOLDER] = os.environ[OF_SEVERAL_SERVERS]
    elif _collector is None:
        if multiprocessing.parent_process() is None or FOLDER not in os.environ:
            _own_folder = tempfile.TemporaryDirectory(prefix="flexquant-metrics-")
            os.environ[FOLDER] = _own_folder.name
        _collector = MultiProcessCollector(REGISTRY, os.environ[FOLDER])


def metrics_of_worker(vllm_config: VllmConfig) -> PassMetrics | None:
    """Return the counters of this worker; None if another worker counts for its engine, or nobody reads them.

    The first rank of the last pipeline stage counts, as it computes logits, with which a pass ends.
    """
    parallel = vllm_config.parallel_config
    folder = Path(os.environ.get(FOLDER, ""))
    if parallel.rank != parallel.world_size - parallel.tensor_parallel_size or not folder.is_absolute():
        return None
    if not folder.is_dir():
        return None
    labels = (
        ("model_name", str(vllm_config.model_config.served_model_name)),
        ("engine", str(parallel.data_parallel_index)),
    )
    return PassMetrics(folder, labels, torch.device(vllm_config.device_config.device_type))


Labels = tuple[tuple[str, str], ...]
"""(Name, value) of each label."""
FILE_BYTES = 1 << 20
"""Initial bytes of a file of counters; a plan and phase takes 12 KiB, or more if its name is long."""
ENTRY_BYTES = 32
"""Upper bound on the bytes of an entry beside its key: length, padding, value and timestamp."""
NUMBER_BYTES = 16
VALUE_AND_TIME = struct.Struct("dd").pack
SIZE_ENDS = [floatToGoString(end) for end in (*SIZE_BUCKETS, float("inf"))]


class SharedNumbers(MmapedDict):
    """The numbers of a new file by key; disk space is reserved for each number before it is written.

    prometheus_client maps a sparse file, and extends it sparsely; on a full disk, a write to a hole kills the
    process.
    """

    def __init__(self, file: Path) -> None:
        """Make the file; raise FlexQuantError if the disk has no room for FILE_BYTES."""
        try:
            with file.open("wb") as f:
                os.posix_fallocate(f.fileno(), 0, FILE_BYTES)
        except OSError as e:
            raise FlexQuantError(
                f"cannot write {FILE_BYTES >> 10} KiB of metrics to {file} ({e.strerror}); make room there, "
                "or set TMPDIR to a folder on another disk"
            ) from e
        super().__init__(str(file))
        self._is_full = False

    def _init_value(self, key: str) -> None:
        """Reserve the place of a key's number.

        On a full disk all new keys share one place that nobody reads: their numbers are lost.
        """
        if not self._is_full:
            self._reserve(self._used + len(key.encode()) + 2 * ENTRY_BYTES)
        if self._is_full:
            self._positions[key] = self._capacity - ENTRY_BYTES
        else:
            super()._init_value(key)

    def place(self, key: str) -> slice:
        """Return where the number of a key that has been read, and its time, lie in the file."""
        position = self._positions[key]
        return slice(position, position + NUMBER_BYTES)

    def _reserve(self, size: int) -> None:
        capacity = self._capacity
        while capacity < size:
            capacity *= 2
        try:
            if capacity > self._capacity:
                os.posix_fallocate(self._f.fileno(), 0, capacity)
        except OSError as e:
            self._is_full = True
            logger.warning(
                "%s has no room for more metrics (%s): plans and policies that come now are not told there; "
                "make room, and start the server again",
                self._fname,
                e.strerror,
            )


class SharedNumber:
    """A number in shared memory that only this object changes, so it never reads the number back."""

    __slots__ = ("_memory", "_place", "_value")

    def __init__(self, memory: SharedNumbers, key: str) -> None:
        self._memory = memory
        self._value, _ = memory.read_value(key)
        self._place = memory.place(key)

    def add(self, amount: float) -> None:
        self._value += amount
        # In one piece, as prometheus_client writes it: a reader never sees half of a number.
        self._memory._m[self._place] = VALUE_AND_TIME(self._value, 0.0)


@dataclass(frozen=True)
class PlanCounters:
    """Counters of one plan and phase."""

    forward: SharedNumber
    tokens: SharedNumber
    padded_tokens: SharedNumber
    seconds: SharedNumber
    size: SharedNumber
    """Sum of the sizes of all passes."""
    buckets: list[SharedNumber]
    """Number of passes in each bucket of sizes, in the order of SIZE_ENDS."""
    replays: Callable[[CUDAGraphMode], SharedNumber]


class PassMetrics:
    """The counters of one engine, in shared memory."""

    def __init__(self, folder: Path, labels: Labels, device: torch.device) -> None:
        """Make the files in ``folder``; every metric gets the ``labels``; ``device`` runs the passes."""
        self._labels = labels
        self._counters = SharedNumbers(folder / f"counter_flexquant{os.getpid()}.db")
        self._sizes = SharedNumbers(folder / f"histogram_flexquant{os.getpid()}.db")
        # If several engines report the same gauge, the largest value is shown.
        self._gauges = SharedNumbers(folder / f"gauge_max_flexquant{os.getpid()}.db")
        self._of = functools.cache(self._make_counters)
        self.clock: PassClock[SharedNumber] = PassClock(device, SharedNumber.add)
        self._seconds: SharedNumber | None = None
        """Seconds of the plan and phase that were counted last."""
        self._policy: Labels | None = None

    def announce_weights(self, nbytes: BytesByRange) -> None:
        """Publish the bytes of weights by variant and range of layers."""
        for variant, of_variant in nbytes.items():
            for layers, size in of_variant.items():
                self._set(WEIGHT_BYTES, size, ("variant", variant), ("layers", layers))

    def announce_policy(self, name: str, digest: str) -> None:
        """Publish which policy routes from now on; ``digest`` is the digest of its document."""
        if self._policy is not None:
            self._set(POLICY, 0, *self._policy)
        self._policy = (("policy", name), ("digest", digest))
        self._set(POLICY, 1, *self._policy)

    def count_pass(self, forward_pass: Pass, plan: str, graph: CUDAGraphMode) -> None:
        """Count a pass; ``graph`` is the mode of the CUDA graphs that it runs from."""
        counters = self._of(plan, forward_pass.phase)
        self._seconds = counters.seconds
        counters.forward.add(1)
        counters.tokens.add(forward_pass.scheduled_tokens)
        counters.padded_tokens.add(forward_pass.tokens)
        size = forward_pass.sequences if forward_pass.phase == "decode" else forward_pass.scheduled_tokens
        counters.buckets[bisect_left(SIZE_BUCKETS, size)].add(1)
        counters.size.add(size)
        if graph != CUDAGraphMode.NONE:
            counters.replays(graph).add(1)

    def time_pass(self) -> None:
        """Count the seconds of the pass that has ended, which is counted by now; on a GPU with delay."""
        if self._seconds is not None:
            self.clock.attribute(self._seconds)

    def counted(self) -> list[dict[str, str | float]]:
        """Return a record for each plan and phase that has run, with the counters by name."""
        cells: dict[tuple[str, str], dict[str, str | float]] = {}
        for key, value, _ in self._counters.read_all_values():
            metric, _, labels, _ = json.loads(key)
            if all(labels[name] == own for name, own in self._labels):
                where = labels["plan"], labels["phase"]
                cell = cells.setdefault(where, {"plan": where[0], "phase": where[1]})
                name = metric.removeprefix("flexquant:") + (f"_{labels['mode']}" if "mode" in labels else "")
                cell[name] = value
        return list(cells.values())

    def _make_counters(self, plan: str, phase: str) -> PlanCounters:
        labels = (("plan", plan), ("phase", phase))

        def counter(metric: str, *more: tuple[str, str]) -> SharedNumber:
            return SharedNumber(self._counters, self._key(metric, f"{metric}_total", (*labels, *more)))

        def of_size(sample: str, *more: tuple[str, str]) -> SharedNumber:
            return SharedNumber(self._sizes, self._key(SIZE, f"{SIZE}_{sample}", (*labels, *more)))

        return PlanCounters(
            forward=counter(FORWARD),
            tokens=counter(TOKENS),
            padded_tokens=counter(PADDED_TOKENS),
            seconds=counter(SECONDS),
            buckets=[of_size("bucket", ("le", end)) for end in SIZE_ENDS],
            size=of_size("sum"),
            replays=functools.cache(lambda mode: counter(REPLAYS, ("mode", mode.name))),
        )

    def _set(self, metric: str, value: float, *labels: tuple[str, str]) -> None:
        self._gauges.write_value(self._key(metric, metric, labels), float(value), 0.0)

    def _key(self, metric: str, sample: str, labels: Labels) -> str:
        named = dict(self._labels + labels)
        return mmap_key(metric, sample, list(named), list(named.values()), HELP[metric])
