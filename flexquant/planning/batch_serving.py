# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Predict the latencies of equal requests that arrive at once: continuous batching with chunked prefill.

As in vLLM's scheduler, a pass has a budget of tokens. Running sequences come first, in the order of their
admission: one token for a sequence in generation, a chunk of the rest of its prompt for another. Waiting ones
are admitted while the budget, the number of sequences and the KV cache allow it; the cache must have room for
the whole prompt. If it runs out of room, the sequence admitted last is preempted, and computed again later.
The server's work between passes takes no time.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from flexquant.planning.device import GIB, Device
from flexquant.planning.roofline import Batch
from flexquant.policy.schema import Phase

BLACKWELL = re.compile(r"\bG?B[123]00\b", re.IGNORECASE)
"""Matches names of data-centre GPUs of compute capability 10, for which vLLM captures larger graphs."""


@dataclass(frozen=True)
class Limits:
    """Limits of a pass and of the running sequences, as ``vllm serve`` (0.32) chooses them by itself."""

    tokens: int
    sequences: int
    block_size: int
    """Tokens of a block of the KV cache."""
    graphs: tuple[int, ...]
    """Tokens of the CUDA graphs, ascending; empty on a CPU."""

    @classmethod
    def of(cls, device: Device, devices: int = 1) -> Limits:
        """Follow vLLM's ``EngineArgs.get_batch_defaults`` and ``VllmConfig._set_cudagraph_sizes``."""
        if not device.is_gpu:
            return cls(2048 * devices, 128 * devices, 128, ())
        name = f"{device.name} {device.description}"
        if device.memory_bytes >= 160 * GIB:
            tokens, sequences = 16384, 1024
        elif device.memory_bytes >= 70 * GIB and "a100" not in name.lower():
            tokens, sequences = 8192, 1024
        else:
            tokens, sequences = 2048, 256
        largest = min(2 * sequences, 1024 if BLACKWELL.search(name) else 512)
        return cls(tokens, sequences, 16, (1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)))

    def padded(self, tokens: int) -> int:
        """Return the tokens of the smallest CUDA graph that holds a pass; ``tokens`` if there is none."""
        return next((size for size in self.graphs if size >= tokens), tokens)

    def in_blocks(self, tokens: int) -> int:
        """Return the tokens of the blocks that hold a sequence's tokens."""
        return -(-tokens // self.block_size) * self.block_size


@dataclass(frozen=True)
class Batches:
    """Loads to serve, each of which arrives at once; all requests are alike."""

    input_tokens: int
    output_tokens: int
    concurrency: Sequence[int]
    """Requests at once, one number for each load."""

    @property
    def request_tokens(self) -> int:
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True)
class Load:
    """Means over the requests of a load that all arrive at once, in seconds."""

    ttft: float
    tpot: float
    request: float
    """From arrival to the last token."""


@dataclass(eq=False)
class Served:
    """A request in service."""

    length: int
    """Tokens of its prompt, and of its answer so far."""
    computed: int = 0
    """Its tokens in the KV cache."""
    first_token: float = 0.0
    last_token: float = 0.0


Chunk = tuple[Served, int]
"""A request, and its tokens in a pass."""


def serve_batch(
    batches: Batches,
    count: int,
    limits: Limits,
    kv_cache_tokens: int,
    seconds: Callable[[Phase, Batch], float],
) -> Load:
    """Serve ``count`` requests that arrive at once; ``seconds`` returns the time of a pass.

    The KV cache has to hold the blocks of one request.
    """
    requests = [Served(batches.input_tokens) for _ in range(count)]
    waiting, running = deque(requests), list[Served]()
    now = 0.0
    while waiting or running:
        chunks = _schedule(waiting, running, limits, kv_cache_tokens)
        now += seconds(*_describe(chunks, limits))
        for request, tokens in chunks:
            request.computed += tokens
            if request.computed == request.length:
                if request.length == batches.input_tokens:
                    request.first_token = now
                request.length += 1
                request.last_token = now
        running = [request for request in running if request.length < batches.request_tokens]
    after_first = fmean(request.last_token - request.first_token for request in requests)
    return Load(
        fmean(request.first_token for request in requests),
        after_first / max(1, batches.output_tokens - 1),
        fmean(request.last_token for request in requests),
    )


def _schedule(
    waiting: deque[Served], running: list[Served], limits: Limits, kv_cache_tokens: int
) -> list[Chunk]:
    """Return the next pass; move the requests that it admits or preempts."""
    budget = limits.tokens
    room = kv_cache_tokens // limits.block_size * limits.block_size
    room -= sum(limits.in_blocks(request.computed) for request in running)
    chunks: list[Chunk] = []

    def take(request: Served) -> None:
        nonlocal budget, room
        tokens = min(request.length - request.computed, budget)
        room -= limits.in_blocks(request.computed + tokens) - limits.in_blocks(request.computed)
        budget -= tokens
        chunks.append((request, tokens))

    while len(chunks) < len(running) and budget:
        request = running[len(chunks)]
        end = request.computed + min(request.length - request.computed, budget)
        while limits.in_blocks(end) - limits.in_blocks(request.computed) > room:
            last = running.pop()
            room += limits.in_blocks(last.computed)
            last.computed = 0
            waiting.appendleft(last)
            if last is request:
                return chunks
        take(request)
    while waiting and budget and len(running) < limits.sequences:
        if limits.in_blocks(waiting[0].length) > room:
            break
        running.append(waiting.popleft())
        take(running[-1])
    return chunks


def _describe(chunks: Sequence[Chunk], limits: Limits) -> tuple[Phase, Batch]:
    """Return a pass's phase, by its tokens per sequence as serving tells it, and what it computes."""
    lengths = {tokens for _, tokens in chunks}
    phase: Phase = "decode" if lengths == {1} else "mixed" if 1 in lengths else "prefill"
    return phase, Batch(
        limits.padded(sum(tokens for _, tokens in chunks)),
        len(chunks),
        sum(request.computed for request, tokens in chunks if tokens == 1),
        sum(tokens * (request.computed + (tokens + 1) / 2) for request, tokens in chunks if tokens > 1),
    )
