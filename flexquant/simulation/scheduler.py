# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What vLLM puts into the next forward pass: continuous batching with chunked prefill.

After ``vllm/v1/core/sched/scheduler.py`` of vLLM 0.32, ``Scheduler.schedule``. A pass has a budget of tokens.
Running sequences come first, in the order in which they were admitted: one token each in generation, a chunk
of what is left of a prompt. Then waiting ones are admitted, first come, first served, while the budget, the
number of sequences and the KV cache allow: the cache must have room for a whole prompt, though blocks are
taken chunk by chunk. When blocks run out, the sequence admitted last loses its own and returns to the head of
the queue, where its prompt and what it has generated become its prompt; it needs more than the blocks that it
left, so that no other is admitted in that pass either. The pass that computes the last token
of a prompt also yields the first token of the answer.

Not modelled: prefix caching, speculative decoding, priorities, and asynchronous scheduling, vLLM's default on
GPUs: there a request that arrives during pass n joins pass n + 2 rather than n + 1, and a finished sequence
holds its place for one pass more.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

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

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"max-num-batched-tokens is {self.max_num_batched_tokens}, but every one of max-num-seqs' "
                f"{self.max_num_seqs} sequences needs a token, as vLLM demands; raise the one or lower the "
                "other"
            )

    @property
    def blocks(self) -> float:
        """Blocks of the KV cache, a whole number or infinity."""
        return math.inf if self.kv_cache_tokens is None else self.kv_cache_tokens // self.block_size

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
    """Tokens in the KV cache."""
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


Batch = list[tuple[Sequence, int, int]]
"""A pass: (sequence, its tokens in the pass, its tokens that the KV cache held before)."""


class Scheduler:
    """Sequences that wait and run; :meth:`schedule` and :meth:`complete` alternate."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.free_blocks = limits.blocks

    def schedule(self) -> Batch:
        """Return the next pass, of at least one token unless no sequence waits or runs."""
        size = self.limits.block_size
        budget = self.limits.max_num_batched_tokens
        batch: Batch = []
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            tokens = min(sequence.length - sequence.computed, budget)
            needed = -(-(sequence.computed + tokens) // size) - sequence.blocks
            while needed > self.free_blocks:
                if self._preempt_last() is sequence:
                    break
            else:
                self._take(sequence, needed)
                batch.append((sequence, tokens, sequence.computed))
                budget -= tokens
                index += 1
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            if -(-sequence.length // size) > self.free_blocks:
                break
            self.running.append(self.waiting.popleft())
            tokens = min(sequence.length, budget)
            self._take(sequence, -(-tokens // size))
            batch.append((sequence, tokens, 0))
            budget -= tokens
        return batch

    def complete(self, batch: Batch) -> list[Sequence]:
        """Account for a pass that has run; return the sequences to which it gave a token."""
        yielded = []
        finished = False
        for sequence, tokens, _ in batch:
            sequence.computed += tokens
            if sequence.computed == sequence.length:
                sequence.length += 1
                yielded.append(sequence)
                if sequence.generated == sequence.request.output:
                    finished = True
                    self._release(sequence)
        if finished:
            self.running = [s for s in self.running if s.generated < s.request.output]
        return yielded

    def _take(self, sequence: Sequence, blocks: int) -> None:
        sequence.blocks += blocks
        self.free_blocks -= blocks

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
