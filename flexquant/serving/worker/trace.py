# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Write a trace file with the contents and the plan of every forward pass."""

from __future__ import annotations

from contextlib import suppress
from typing import BinaryIO

import msgspec
from vllm.config import VllmConfig
from vllm.logger import init_logger

from flexquant.checkpoint.model_config import JsonObject
from flexquant.errors import FlexQuantError
from flexquant.serving.options import ServingOptions
from flexquant.serving.worker.forward_pass import Pass

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
