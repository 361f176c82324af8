# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Record a worker's passes in its metrics and, if one is configured, in a trace of passes and plans."""

from __future__ import annotations

from contextlib import suppress
from typing import BinaryIO

import msgspec
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger

from flexquant import __version__
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.weight_bytes import BytesByRange
from flexquant.errors import FlexQuantError
from flexquant.serving.options import ServingOptions
from flexquant.serving.worker.forward_pass import Pass
from flexquant.serving.worker.metrics import PassMetrics, metrics_of_worker
from flexquant.serving.worker.policy_change import ServedPolicy
from flexquant.serving.worker.request_plans import RequestPlans

logger = init_logger("vllm.flexquant.trace")


def trace_file(vllm_config: VllmConfig) -> str | None:
    """Return the file of this worker's trace; None if no trace is configured.

    Every worker has a file of its own. The first worker's file has the user's name; the others' names end in
    ``.dp1`` (the data-parallel replica) or ``.rank1`` (the rank within it, tensor and pipeline parallel).
    """
    file = ServingOptions.from_vllm(vllm_config).trace
    if file is None:
        return None
    replica, rank = vllm_config.parallel_config.data_parallel_index, vllm_config.parallel_config.rank
    return file + (f".dp{replica}" if replica else "") + (f".rank{rank}" if rank else "")


class Trace:
    """A file with one JSON object per line: first what is served, then every forward pass in order.

    If the file reaches its largest size or cannot be written, the trace ends with a warning, and serving
    continues.
    """

    def __init__(self, path: str, mib: int) -> None:
        """Open the file; ``mib`` is its largest size in MiB."""
        try:
            self._file: BinaryIO | None = open(path, "wb", buffering=0)  # noqa: SIM115 - lives with the model
        except OSError as e:
            raise FlexQuantError(f"cannot write the trace '{path}' ({e.strerror}); name another file") from e
        self._path, self._mib, self._size = path, mib, 0
        self._encode = msgspec.json.Encoder().encode

    def begin(self, header: JsonObject) -> None:
        """Write what is served; called before the first :meth:`record`."""
        self._write(header)

    def _write(self, record: JsonObject) -> None:
        if self._file is None:
            return
        line = self._encode(record) + b"\n"
        size = self._size + len(line)
        if size > self._mib << 20:
            self._end(f"it may have {self._mib} MiB ('flexquant.trace_mib')")
            return
        try:
            while line:  # a full disk takes a part of the line, and raises the error for the rest
                line = line[self._file.write(line) :]
            self._size = size
        except OSError as e:
            with suppress(OSError):  # a pipe cannot be truncated
                self._file.truncate(self._size)
            self._end(f"it cannot be written ({e.strerror})")

    def _end(self, why: str) -> None:
        logger.warning("the trace '%s' ends here, and serving goes on: %s", self._path, why)
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # some file systems report a full disk only now
                file.close()

    def record(self, forward_pass: Pass, plan: str) -> None:
        if self._file is None:
            return
        record = {**forward_pass.to_data(), "plan": plan}
        if forward_pass.requests is not None:
            record["requests"] = forward_pass.requests
        self._write(record)


class PassRecords:
    """The trace and the metrics of one worker; either can be missing."""

    def __init__(self, metrics: PassMetrics | None, trace: Trace | None) -> None:
        self._metrics = metrics
        self._trace = trace
        self._last: tuple[Pass, str, str] | None = None
        self.requests = RequestPlans()

    @classmethod
    def of_worker(cls, vllm_config: VllmConfig) -> PassRecords:
        """Return the records that this worker keeps under the configuration."""
        file, mib = trace_file(vllm_config), ServingOptions.from_vllm(vllm_config).trace_mib
        return cls(metrics_of_worker(vllm_config), Trace(file, mib) if file is not None else None)

    def announce_weights(self, nbytes: BytesByRange) -> None:
        """Publish the bytes of weights by variant and range of layers."""
        if self._metrics is not None:
            self._metrics.announce_weights(nbytes)

    def announce_policy(self, policy: ServedPolicy, **details: object) -> None:
        """Record the policy that routes passes from now on; ``details`` go into the trace."""
        if self._metrics is not None:
            self._metrics.announce_policy(policy.name, policy.digest)
        if self._trace is not None:
            plans = {plan.name: list(plan.layers) for plan in policy.routes.plans}
            self._trace.begin({"flexquant": __version__, "policy": policy.name, "plans": plans, **details})

    def begin(self) -> None:
        """Note that a pass begins; :meth:`serve` says which."""
        if self._metrics is not None:
            self._metrics.clock.begin()

    def serve(self, forward_pass: Pass, plan: str, graph: CUDAGraphMode, moment: str = "") -> None:
        """Record a pass of vLLM's scheduler.

        ``graph`` is the mode of the CUDA graphs that it runs from, ``moment`` the name of its span of
        moments.
        """
        self._last = (forward_pass, plan, moment)
        if forward_pass.requests is not None:
            self.requests.record(forward_pass.requests, plan, moment)
        if self._trace is not None:
            self._trace.record(forward_pass, plan)
        if self._metrics is not None:
            self._metrics.count_pass(forward_pass, plan, graph)

    def end(self) -> None:
        """Note that the pass that began last has ended."""
        if self._metrics is not None:
            self._metrics.clock.end()

    def time(self) -> None:
        """Record the time of the pass that has ended, after :meth:`serve` said which it was."""
        if self._metrics is not None:
            self._metrics.time_pass()

    def counted(self) -> list[dict[str, str | float]] | None:
        """Return a record for each plan and phase that has run; None if another worker counts."""
        return self._metrics.counted() if self._metrics is not None else None

    def last_pass(self) -> JsonObject | None:
        """Return the last pass and its plan, in the form of the trace; None before the first pass."""
        if self._last is None:
            return None
        forward_pass, plan, moment = self._last
        return {**forward_pass.to_data(), "plan": plan} | ({"moment": moment} if moment else {})
