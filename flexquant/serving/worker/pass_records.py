# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Record a worker's passes: their counters and times, and a trace if one is configured.

A worker counts, since it sees every pass, even one that vLLM replays from a FULL graph. The API server asks
for its counters (:mod:`flexquant.serving.frontend.metrics`). One worker of an engine tells them, since all
workers run the same passes; every worker has a trace.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO

import msgspec
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger

from flexquant import __version__
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.weight_bytes import BytesByRange
from flexquant.errors import FlexQuantError
from flexquant.serving.config import RankMetrics, ServedPolicy, ServingOptions
from flexquant.serving.worker.forward_pass import Pass

logger = init_logger("vllm.flexquant.trace")

EVENTS = 16
"""Events that are made at first, for eight passes on a GPU; more are made only if it is further behind."""
SIZE_BUCKETS = (1, 2, 3, *(factor << power for power in range(1, 13) for factor in (2, 3)), 1 << 14)
"""Upper ends of the buckets of passes by size: 1, 2, 3, 4, 6, 8, 12, 16, ..., 8192, 12288, 16384."""
SIZE_ENDS = [*(f"{end}.0" for end in SIZE_BUCKETS), "+Inf"]
"""The same as Prometheus writes them, with the bucket of all larger sizes."""


class PassClock:
    """Times successive passes, from the description of the batch until the logits are requested.

    A pass whose logits nobody requests has no time. On a GPU both moments are events in its stream, which are
    read once they have passed, so nothing waits for the GPU; they are used again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = None if device.type == "cpu" else device
        self._began: float | torch.Event | None = None
        self._ended: tuple[torch.Event, torch.Event] | float | None = None
        """Begin and end of the pass that ended last, or its seconds; None once they are counted."""
        self._under_way: deque[tuple[PlanCounters, torch.Event, torch.Event]] = deque()
        self._idle: list[torch.Event] = []
        if self._device is not None:
            self._idle = [self._record() for _ in range(EVENTS)]

    def begin(self) -> None:
        if self._device is None:
            self._began = time.perf_counter()
        elif isinstance(self._began, torch.Event):
            self._began.record()
        else:
            self._began = self._record()

    def end(self) -> None:
        """Note that the pass that began last has ended; a second call does nothing."""
        began, self._began = self._began, None
        if isinstance(began, float):
            self._ended = time.perf_counter() - began
        elif began is not None:
            self._ended = began, self._record()

    def count(self, counters: PlanCounters) -> None:
        """Add the seconds of the pass that ended last, on a GPU with delay; a second call does nothing."""
        times, self._ended = self._ended, None
        if isinstance(times, float):
            counters.forward_seconds += times
        elif times is not None:
            self._under_way.append((counters, *times))
            while self._under_way and self._under_way[0][2].query():
                passed, first, last = self._under_way.popleft()
                passed.forward_seconds += first.elapsed_time(last) / 1000
                self._idle += (first, last)

    def _record(self) -> torch.Event:
        """Return an event that is recorded now; the first record of an event makes it on the device."""
        event = self._idle.pop() if self._idle else torch.Event(self._device, enable_timing=True)
        event.record()
        return event


@dataclass(slots=True)
class PlanCounters:
    """Counters of one plan and phase; fields with an own metric have its name behind ``flexquant:``."""

    forward: int = 0
    tokens: int = 0
    """Tokens without padding."""
    padded_tokens: int = 0
    forward_seconds: float = 0.0
    size: int = 0
    """Sum of the sizes of all passes: their sequences in decode, else their tokens, without padding."""
    buckets: list[int] = field(default_factory=lambda: [0] * len(SIZE_ENDS))
    """Number of passes in each bucket of sizes, in the order of SIZE_ENDS."""
    replays: Counter[str] = field(default_factory=Counter)
    """Mode of CUDA graphs -> number of passes that ran from such graphs."""

    def count(self, forward_pass: Pass, graph: CUDAGraphMode) -> None:
        """Count a pass; ``graph`` is the mode of the CUDA graphs that it runs from."""
        size = forward_pass.sequences if forward_pass.phase == "decode" else forward_pass.scheduled_tokens
        self.forward += 1
        self.tokens += forward_pass.scheduled_tokens
        self.padded_tokens += forward_pass.tokens
        self.size += size
        self.buckets[bisect_left(SIZE_BUCKETS, size)] += 1
        if graph != CUDAGraphMode.NONE:
            self.replays[graph.name] += 1

    def histogram(self) -> tuple[list[tuple[str, int]], int]:
        """Return the upper end of each bucket with the passes up to it, and the sum of the sizes."""
        return [*zip(SIZE_ENDS, itertools.accumulate(self.buckets), strict=True)], self.size

    def to_data(self) -> dict[str, float]:
        """Return the counters but the buckets, by their names in ``/metrics`` without ``flexquant:``."""
        names = ("forward", "tokens", "padded_tokens", "forward_seconds")
        replays = {f"graph_replays_{mode}": number for mode, number in self.replays.items()}
        return {name: getattr(self, name) for name in names} | replays


def trace_file(vllm_config: VllmConfig) -> str | None:
    """Return this worker's trace, if one is configured: other workers' end in ``.dp1`` or ``.rank1``."""
    file = ServingOptions.from_vllm(vllm_config).trace
    if file is None:
        return None
    replica, rank = vllm_config.parallel_config.data_parallel_index, vllm_config.parallel_config.rank
    return file + (f".dp{replica}" if replica else "") + (f".rank{rank}" if rank else "")


class Trace:
    """A file with one JSON object per line: first what is served, then every forward pass in order.

    If it reaches its largest size or cannot be written, it ends with a warning, and serving continues.
    """

    def __init__(self, path: str, mib: int) -> None:
        """Open the file, which the first line empties; ``mib`` is its largest size in MiB."""
        try:
            self._file: BinaryIO | None = open(path, "ab", buffering=0)  # noqa: SIM115 - lives with the model
        except OSError as e:
            raise FlexQuantError(f"cannot write the trace '{path}' ({e.strerror}); name another file") from e
        self._path, self._mib, self._size = path, mib, 0
        self._encode = msgspec.json.Encoder().encode

    def write(self, record: JsonObject) -> None:
        """Write one line, unless the trace has ended."""
        if self._file is None:
            return
        line = self._encode(record) + b"\n"
        size = self._size + len(line)
        if size > self._mib << 20:
            self._end(f"it may have {self._mib} MiB ('flexquant.trace_mib')")
            return
        try:
            if not self._size:
                self._cut()
            while line:  # a full disk takes a part of the line, and raises the error for the rest
                line = line[self._file.write(line) :]
            self._size = size
        except OSError as e:
            self._cut()
            self._end(f"it cannot be written ({e.strerror})")

    def _cut(self) -> None:
        """Remove what stands behind the lines that were written whole."""
        with suppress(OSError):  # a pipe cannot be truncated
            assert self._file is not None
            self._file.truncate(self._size)

    def _end(self, why: str) -> None:
        logger.warning("the trace '%s' ends here, and serving goes on: %s", self._path, why)
        assert self._file is not None
        with suppress(OSError):  # some file systems report a full disk only now
            self._file.close()
        self._file = None


class PassRecords:
    """The trace and the counters of an engine, told by the first rank of the last stage, which has logits."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        parallel, file = vllm_config.parallel_config, trace_file(vllm_config)
        mib = ServingOptions.from_vllm(vllm_config).trace_mib
        self._trace = Trace(file, mib) if file is not None else None
        self._tells = parallel.rank == parallel.world_size - parallel.tensor_parallel_size
        self.clock = PassClock(torch.device(vllm_config.device_config.device_type))
        """Is told when a pass begins, and that it has ended before :meth:`time`."""
        self._engine = str(parallel.data_parallel_index)
        self._counters: dict[tuple[str, str], PlanCounters] = {}
        """(Plan, phase) -> counters."""
        self._policies: dict[tuple[str, str], int] = {}
        """(Name, digest) of the last policies that have routed -> whether it routes now."""
        self._last: tuple[Pass, str] | None = None

    def announce_policy(self, policy: ServedPolicy, **details: object) -> None:
        """Record the policy that routes passes from now on; ``details`` go into the trace."""
        self._policies = {**dict.fromkeys([*self._policies][-99:], 0), (policy.name, policy.digest): 1}
        if self._trace is not None:
            plans = policy.routes.layers_by_plan()
            self._trace.write({"flexquant": __version__, "policy": policy.name, "plans": plans, **details})

    def serve(self, forward_pass: Pass, plan: str, graph: CUDAGraphMode) -> None:
        """Record a pass of vLLM's scheduler; ``graph`` is the mode of the CUDA graphs that it runs from."""
        self._last = (forward_pass, plan)
        if self._trace is not None:
            self._trace.write({**forward_pass._asdict(), "plan": plan})
        where = plan, forward_pass.phase
        counters = self._counters.get(where) or self._counters.setdefault(where, PlanCounters())
        counters.count(forward_pass, graph)

    def time(self) -> None:
        """Count the seconds of the pass that has ended, after :meth:`serve` said which it was."""
        if self._last is not None:
            forward_pass, plan = self._last
            self.clock.count(self._counters[plan, forward_pass.phase])

    def last_pass(self) -> JsonObject | None:
        """Return the last pass and its plan, in the form of the trace; None before the first pass."""
        return {**self._last[0]._asdict(), "plan": self._last[1]} if self._last is not None else None

    def counted(self) -> list[JsonObject] | None:
        """Return a record for each plan and phase that has run; None if another worker tells."""
        cells = self._counters.items()
        told = [{"plan": plan, "phase": phase, **counters.to_data()} for (plan, phase), counters in cells]
        return told if self._tells else None

    def metrics_data(self, weight_bytes: BytesByRange) -> RankMetrics | None:
        """Return all counters, and the policies, for ``/metrics``; None if another worker tells."""
        if (counted := self.counted()) is None:
            return None
        return {
            "engine": self._engine,
            "policies": [(*policy, routes) for policy, routes in self._policies.items()],
            "counted": counted,
            "sizes": [counters.histogram() for counters in self._counters.values()],
            "weight_bytes_by_layers": weight_bytes,
        }
