# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A file that tells of every forward pass what it held and which plan ran it."""

from __future__ import annotations

from typing import Any, BinaryIO

import msgspec
from vllm.config import VllmConfig

from flexquant.errors import FlexQuantError
from flexquant.serving.forward_pass import Pass
from flexquant.serving.options import ServingOptions


def trace_file(vllm_config: VllmConfig) -> str | None:
    """Return the file of this worker's trace; None if none is asked for.

    Every worker has a file of its own: the first the one that the user named, the others with ``.dp1`` (the
    data-parallel replica) or ``.rank1`` (the rank within it, tensor and pipeline parallel) behind it.
    """
    file = ServingOptions.from_vllm(vllm_config).trace
    if file is None:
        return None
    replica, rank = vllm_config.parallel_config.data_parallel_index, vllm_config.parallel_config.rank
    return file + (f".dp{replica}" if replica else "") + (f".rank{rank}" if rank else "")


class Trace:
    """A file with one JSON object per line: first what is served, then every forward pass in order."""

    def __init__(self, path: str) -> None:
        try:
            self._file: BinaryIO = open(path, "wb", buffering=0)  # noqa: SIM115 - lives as long as the model
        except OSError as e:
            raise FlexQuantError(f"cannot write the trace '{path}' ({e.strerror}); name another file") from e
        self._encode = msgspec.json.Encoder().encode

    def begin(self, header: dict[str, Any]) -> None:
        """Write what is served; comes before every :meth:`record`."""
        self._write(header)

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(self._encode(record) + b"\n")

    def record(self, forward_pass: Pass, plan: str) -> None:
        record = {**forward_pass.to_data(), "plan": plan}
        if forward_pass.requests is not None:
            record["requests"] = forward_pass.requests
        self._write(record)
