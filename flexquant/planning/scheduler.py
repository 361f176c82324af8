# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Model what vLLM puts into the next forward pass: continuous batching with chunked prefill.

This follows ``Scheduler.schedule`` in ``vllm/v1/core/sched/scheduler.py`` of vLLM 0.32. A pass has a budget
of tokens. Running sequences come first, in the order of their admission: one token for a sequence in
generation, a chunk of the rest of its prompt for another. Then waiting sequences are admitted, first come,
first served, while the budget, the number of sequences and the KV cache allow it. The cache must have room
for the whole prompt, though blocks are allocated chunk by chunk. If blocks run out, the sequence admitted
last is preempted: it frees its blocks and returns to the head of the queue, with its generated tokens added
to its prompt, and no sequence is admitted in that pass. The pass that computes the last token of a prompt
also yields the first token of the answer.

With asynchronous scheduling (``async_scheduler.py``), vLLM's default on GPUs, pass n + 1 is scheduled while
pass n runs: a request that arrives during pass n joins pass n + 2 rather than n + 1, and a sequence that pass
n finishes still holds its place and its blocks when pass n + 1 is scheduled.

Prefix caching, speculative decoding and priorities are not modelled.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from flexquant.errors import FlexQuantError, UsageError
from flexquant.planning.trace import Request


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
    """Tokens of the prompt and tokens generated so far, together."""
    computed: int = 0
    """Tokens in the KV cache once the passes in flight have ended."""
    pending: int = 0
    """Tokens that the passes in flight will yield."""
    blocks: int = 0
    preemptions: int = 0
    first_token: float = math.nan
    """Time of the first token, in seconds on the trace's clock."""
    last_token: float = math.nan
    """Time of the latest token, in seconds on the trace's clock."""

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
    """The sequence's tokens in the KV cache before the pass."""
    yields: bool
    """Whether the pass yields a token of the answer."""


Batch = list[Chunk]


class Scheduler:
    """The waiting and the running sequences.

    The caller completes every pass that :meth:`schedule` returns, in order, and never has more than
    ``limits.passes_in_flight`` passes open.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.free_blocks = limits.blocks

    def schedule(self) -> Batch:
        """Return the next pass; empty if there is nothing to compute, or only passes in flight to await."""
        size = self.limits.block_size
        budget = self.limits.max_num_batched_tokens
        batch: Batch = []
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            if sequence.generated + sequence.pending == sequence.request.output:
                index += 1  # a pass in flight yields its last token
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
        """Account for a pass that has run; return the sequences that got a token."""
        yielded = [chunk.sequence for chunk in batch if chunk.yields]
        finished = False
        for sequence in yielded:
            sequence.length += 1
            sequence.pending -= 1
            if sequence.generated == sequence.request.output:
                finished = True
                self._release(sequence)
                if sequence.computed == 0:  # preempted since the pass was scheduled
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
