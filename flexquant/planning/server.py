# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Limits of a server, and what ``vllm serve`` (0.32) chooses by itself (``EngineArgs``, ``VllmConfig``)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexquant.errors import FlexQuantError, UsageError
from flexquant.planning.trace import Request
from flexquant.policy.pass_times import PassTimes

if TYPE_CHECKING:
    from flexquant.planning.device import Device

BLACKWELL = re.compile(r"\bG?B[123]00\b", re.IGNORECASE)
"""Matches names of data-centre GPUs of compute capability 10, for which vLLM captures larger graphs."""
GIB = 2**30


@dataclass(frozen=True)
class Limits:
    """Limits of a pass and of the running sequences, named like vLLM's arguments."""

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    kv_cache_tokens: int | None = None
    """Tokens that the KV cache holds, in whole blocks; None: no limit."""
    block_size: int = 16
    """Tokens of a block."""
    capture_sizes: tuple[int, ...] = ()
    """Tokens of the CUDA graphs, ascending; empty on a CPU and in eager mode."""
    async_scheduling: bool = False

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"max-num-batched-tokens is {self.max_num_batched_tokens}, but every one of max-num-seqs' "
                f"{self.max_num_seqs} sequences needs a token, as vLLM demands; raise the one or lower the "
                "other"
            )

    def __str__(self) -> str:
        graphs = f"CUDA graphs up to {self.capture_sizes[-1]}" if self.capture_sizes else "no CUDA graphs"
        return (
            f"{self.max_num_batched_tokens} tokens and {self.max_num_seqs} sequences in a pass, blocks of "
            f"{self.block_size}, {graphs}, {'a' if self.async_scheduling else ''}synchronous scheduling"
        )

    @property
    def blocks(self) -> float:
        """Number of blocks of the KV cache; infinity without a limit."""
        return math.inf if self.kv_cache_tokens is None else self.kv_cache_tokens // self.block_size

    def blocks_of(self, tokens: int) -> int:
        """Return the number of blocks that hold a sequence's tokens."""
        return -(-tokens // self.block_size)

    @property
    def passes_in_flight(self) -> int:
        """Most passes that are scheduled and have not ended."""
        return 2 if self.async_scheduling else 1

    @property
    def max_decode_tokens(self) -> int:
        """Most tokens of a decode pass, padding included."""
        return self.padded(self.max_num_seqs)

    def padded(self, tokens: int) -> int:
        """Return the tokens of the smallest CUDA graph that holds a pass; ``tokens`` if there is none."""
        return next((size for size in self.capture_sizes if size >= tokens), tokens)

    def check_fits(self, request: Request, number: int) -> None:
        """Raise FlexQuantError for a request that the KV cache cannot hold even alone.

        ``number`` is the request's place in the trace, from 1.
        """
        tokens = request.input + request.output - 1  # the last token is sampled, but never computed
        if self.blocks_of(tokens) > self.blocks:
            raise FlexQuantError(
                f"request {number} of the trace needs {tokens} tokens of KV cache, but it has "
                f"{self.blocks} blocks of {self.block_size}; raise --kv-cache-tokens or shorten the request"
            )


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
