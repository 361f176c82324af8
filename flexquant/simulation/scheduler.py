# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What vLLM puts into the next forward pass: continuous batching with chunked prefill.

After ``vllm/v1/core/sched/scheduler.py`` of vLLM 0.32, ``Scheduler.schedule``. A pass has a budget of tokens.
Running sequences come first, in the order in which they were admitted: one token each in generation, a chunk
of what is left of a prompt. Then waiting ones are admitted, first come, first served, while the budget, the
number of sequences and the KV cache allow: the cache must have room for a whole prompt, though blocks are
taken chunk by chunk. When blocks run out, the sequence admitted last loses its own and returns to the head of
the queue, where its prompt and what it has generated become its prompt, and no other is admitted in that pass
either. The pass that computes the last token of a prompt also yields the first token of the answer.

With asynchronous scheduling (``async_scheduler.py``), vLLM's default on GPUs, pass n + 1 is scheduled while
pass n runs: a request that arrives during pass n joins pass n + 2 rather than n + 1, and a sequence that pass
n finishes holds its place and its blocks when pass n + 1 is scheduled.

Not modelled: prefix caching, speculative decoding, priorities.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from flexquant.errors import FlexQuantError, UsageError
from flexquant.simulation.trace import Request


@dataclass(frozen=True)
class Limits:
    """What bounds a pass and the sequences in flight, named as vLLM's arguments are."""

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    kv_cache_tokens: int | None = None
    """Tokens that the KV cache holds, in whole blocks; None: no limit."""
    block_size: int = 16
    """Tokens of a block."""
    capture_sizes: tuple[int, ...] = ()
    """Tokens of the CUDA graphs, ascending; none on a CPU and in eager mode."""
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
        """Blocks of the KV cache, a whole number or infinity."""
        return math.inf if self.kv_cache_tokens is None else self.kv_cache_tokens // self.block_size

    @property
    def passes_in_flight(self) -> int:
        """Passes scheduled before the first of them must have ended."""
        return 2 if self.async_scheduling else 1

    @property
    def max_decode_tokens(self) -> int:
        """Most tokens of a decode pass, padding included."""
        return self.padded(self.max_num_seqs)

    def padded(self, tokens: int) -> int:
        """Return the tokens of the smallest CUDA graph that holds a pass; without one it is not padded."""
        return next((size for size in self.capture_sizes if size >= tokens), tokens)

    def check_fits(self, request: Request, number: int) -> None:
        """Raise FlexQuantError for a request that the KV cache cannot hold even alone.

        ``number``: the request's place in the trace, from 1. The last token is never computed.
        """
        tokens = request.input + request.output - 1
        if math.ceil(tokens / self.block_size) > self.blocks:
            raise FlexQuantError(
                f"request {number} of the trace needs {tokens} tokens of KV cache, but it has "
                f"{self.blocks} blocks of {self.block_size}; raise --kv-cache-tokens or shorten the request"
            )


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in service."""

    request: Request
    length: int = field(init=False)
    """Tokens so far: the prompt's, and those generated."""
    computed: int = 0
    """Tokens in the KV cache, when the passes in flight have ended."""
    pending: int = 0
    """Tokens that the passes in flight will yield."""
    blocks: int = 0
    preemptions: int = 0
    first_token: float = math.nan
    """When it got its first token, seconds on the trace's clock."""
    last_token: float = math.nan
    """When it got its latest one."""

    def __post_init__(self) -> None:
        self.length = self.request.input

    @property
    def generated(self) -> int:
        return self.length - self.request.input


class Chunk(NamedTuple):
    """A sequence's part in a pass."""

    sequence: Sequence
    tokens: int
    context: int
    """Its tokens that the KV cache holds before."""
    yields: bool
    """Whether a token of the answer comes of it."""


Batch = list[Chunk]


class Scheduler:
    """Sequences that wait and run.

    Every pass that :meth:`schedule` returns has to be completed, in order, the first of them before more than
    ``limits.passes_in_flight`` are open.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.free_blocks = limits.blocks

    def schedule(self) -> Batch:
        """Return the next pass, empty if all that is left are tokens on the way, or nothing."""
        size = self.limits.block_size
        budget = self.limits.max_num_batched_tokens
        batch: Batch = []
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            if sequence.generated + sequence.pending == sequence.request.output:
                index += 1  # its last token is on the way
                continue
            tokens = min(sequence.length + sequence.pending - sequence.computed, budget)
            needed = -(-(sequence.computed + tokens) // size) - sequence.blocks
            while needed > self.free_blocks:
                preempted = True
                if self._preempt_last() is sequence:
                    break
            else:
                batch.append(self._start(sequence, tokens, needed))
                budget -= tokens
                index += 1
        while self.waiting and not preempted and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            if -(-sequence.length // size) > self.free_blocks:
                break
            self.running.append(self.waiting.popleft())
            tokens = min(sequence.length, budget)
            batch.append(self._start(sequence, tokens, -(-tokens // size)))
            budget -= tokens
        return batch

    def complete(self, batch: Batch) -> list[Sequence]:
        """Account for a pass that has run; return the sequences to which it gave a token."""
        yielded = [chunk.sequence for chunk in batch if chunk.yields]
        finished = False
        for sequence in yielded:
            sequence.length += 1
            sequence.pending -= 1
            if sequence.generated == sequence.request.output:
                finished = True
                self._release(sequence)
                if sequence.computed == 0:  # preempted meanwhile
                    self.waiting.remove(sequence)
        if finished:
            self.running = [s for s in self.running if s.generated < s.request.output]
        return yielded

    def _start(self, sequence: Sequence, tokens: int, blocks: int) -> Chunk:
        sequence.blocks += blocks
        self.free_blocks -= blocks
        context = sequence.computed
        sequence.computed += tokens
        yields = sequence.computed == sequence.length + sequence.pending
        sequence.pending += yields
        return Chunk(sequence, tokens, context, yields)

    def _release(self, sequence: Sequence) -> None:
        self.free_blocks += sequence.blocks
        sequence.blocks = 0

    def _preempt_last(self) -> Sequence:
        sequence = self.running.pop()
        self._release(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        self.waiting.appendleft(sequence)
        return sequence
