# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Compute the limits that ``vllm serve`` chooses by itself (``EngineArgs``, ``VllmConfig`` of vLLM 0.32)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexquant.planning.scheduler import Limits
from flexquant.policy.pass_times import PassTimes

if TYPE_CHECKING:
    from flexquant.planning.device import Device

BLACKWELL = re.compile(r"\bG?B[123]00\b", re.IGNORECASE)
"""Matches names of data-centre GPUs of compute capability 10, for which vLLM captures larger graphs."""
GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """The machine that a server runs on."""

    gpu: str | None = None
    """Name of the GPU; None for a CPU."""
    gpu_memory_bytes: float = 0.0
    """Memory of each GPU; 0 if unknown."""
    devices: int = 1
    """Number of devices that share the model (tensor parallelism)."""
    eager: bool = False
    """Whether the server runs without CUDA graphs."""

    @property
    def largest_graph(self) -> int:
        """Most tokens of a CUDA graph; 0 without graphs."""
        if self.gpu is None or self.eager:
            return 0
        return 1024 if BLACKWELL.search(self.gpu) else 512

    @classmethod
    def of_device(cls, device: Device, devices: int = 1) -> Machine:
        if not device.is_gpu:
            return cls(devices=devices)
        return cls(f"{device.name} {device.description}", device.memory_bytes, devices)

    @classmethod
    def of_times(cls, times: PassTimes) -> Machine:
        """Return the machine on which ``flexquant tune`` measured; a CPU if the times do not name it."""
        machine, engine = times.origin.get("machine"), times.origin.get("engine_arguments")
        engine = engine if isinstance(engine, Mapping) else {}
        devices = engine.get("tensor_parallel_size")
        devices = devices if isinstance(devices, int) else 1
        if not isinstance(machine, Mapping) or machine.get("gpu") is None:
            return cls(devices=devices)
        memory = machine.get("gpu_memory_gib")
        memory = memory * GIB if isinstance(memory, int | float) else 0.0
        return cls(str(machine["gpu"]), memory, devices, bool(engine.get("enforce_eager")))


def server_limits(
    machine: Machine,
    max_num_batched_tokens: int | None = None,
    max_num_seqs: int | None = None,
    kv_cache_tokens: int | None = None,
    block_size: int | None = None,
    capture_sizes: tuple[int, ...] | None = None,
    async_scheduling: bool | None = None,
) -> Limits:
    """Return a server's limits: the given ones, and vLLM's choice for None; the KV cache stays None."""
    on_gpu = machine.gpu is not None
    default_tokens, default_sequences = _batch_defaults(machine)
    tokens = max_num_batched_tokens or default_tokens
    sequences = max_num_seqs or min(default_sequences, tokens)
    if capture_sizes is None:
        capture_sizes = default_capture_sizes(sequences, tokens, machine.largest_graph)
    return Limits(
        tokens,
        sequences,
        kv_cache_tokens,
        block_size or (16 if on_gpu else 128),
        tuple(size for size in capture_sizes if size <= tokens),
        on_gpu if async_scheduling is None else async_scheduling,
    )


def default_capture_sizes(
    max_num_seqs: int, max_num_batched_tokens: int, largest: int = 512
) -> tuple[int, ...]:
    """Return the tokens of the CUDA graphs (``VllmConfig._set_cudagraph_sizes``), ascending."""
    ceiling = min(2 * max_num_seqs, largest)
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, ceiling + 1, 16), max_num_seqs, max_num_batched_tokens}
    return tuple(sorted(size for size in sizes if size <= min(ceiling, max_num_batched_tokens)))


def _batch_defaults(machine: Machine) -> tuple[int, int]:
    """Return max_num_batched_tokens and max_num_seqs (``EngineArgs.get_batch_defaults``)."""
    if machine.gpu is None:
        return 2048 * machine.devices, 128 * machine.devices
    if machine.gpu_memory_bytes >= 160 * GIB:
        return 16384, 1024
    if machine.gpu_memory_bytes >= 70 * GIB and "a100" not in machine.gpu.lower():
        return 8192, 1024
    return 2048, 256
