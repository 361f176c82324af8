# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Model what vLLM puts into the next forward pass: continuous batching with chunked prefill.

This follows ``Scheduler`` and ``AsyncScheduler`` in ``vllm/v1/core/sched`` of vLLM 0.32, and a test compares
whole replays with theirs. They are not used themselves, since a simulation takes a second and needs no vLLM:
importing vLLM takes several seconds, and its scheduler 3 ms for a pass of 180 sequences, ten times as long.

A pass has a budget of tokens. Running sequences come first, in the order of their admission: one token for a
sequence in generation, a chunk of the rest of its prompt for another. Then waiting sequences are admitted,
first come, first served, while the budget, the number of sequences and the KV cache allow it. The cache must
have room for the whole prompt, though blocks are allocated chunk by chunk. If blocks run out, the sequence
admitted last is preempted: it frees its blocks and returns to the head of the queue, with its generated
tokens added to its prompt. What it freed is then taken, so that no sequence is admitted in that pass. The
pass that computes the last token of a prompt also yields the first token of the answer.

With asynchronous scheduling, vLLM's default on GPUs, pass n + 1 is scheduled while pass n runs: a request
that arrives during pass n joins pass n + 2 rather than n + 1, and a sequence that pass n finishes still holds
its place and its blocks when pass n + 1 is scheduled.

Prefix caching, speculative decoding and priorities are not modelled.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from flexquant.planning.server import Limits
from flexquant.planning.trace import Request


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in service."""

    request: Request
    generated: int = 0
    """Tokens of the answer so far."""
    pending: int = 0
    """Tokens of the answer that the passes in flight will yield."""
    computed: int = 0
    """Tokens in the KV cache once the passes in flight have ended; it holds blocks for these."""
    preemptions: int = 0
    first_token: float = math.nan
    """Time of the first token, in seconds on the trace's clock."""
    last_token: float = math.nan
    """Time of the latest token, in seconds on the trace's clock."""

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the answer once the passes in flight have ended."""
        return self.request.input + self.generated + self.pending


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
        limits, blocks_of = self.limits, self.limits.blocks_of
        budget = limits.max_num_batched_tokens
        batch: Batch = []
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            index += 1
            if sequence.generated + sequence.pending == sequence.request.output:
                continue  # a pass in flight yields its last token
            tokens = min(sequence.length - sequence.computed, budget)
            needed = blocks_of(sequence.computed + tokens) - blocks_of(sequence.computed)
            while needed > self.free_blocks:
                if self._preempt_last() is sequence:
                    break
            else:
                batch.append(self._start(sequence, tokens))
                budget -= tokens
        while self.waiting and budget > 0 and len(self.running) < limits.max_num_seqs:
            sequence = self.waiting[0]
            if blocks_of(sequence.length) > self.free_blocks:
                break
            self.running.append(self.waiting.popleft())
            tokens = min(sequence.length, budget)
            batch.append(self._start(sequence, tokens))
            budget -= tokens
        return batch

    def complete(self, batch: Batch) -> list[Sequence]:
        """Account for a pass that has run; return the sequences that got a token."""
        yielded = [chunk.sequence for chunk in batch if chunk.yields]
        finished = False
        for sequence in yielded:
            sequence.generated += 1
            sequence.pending -= 1
            if sequence.generated == sequence.request.output:
                finished = True
                self.free_blocks += self.limits.blocks_of(sequence.computed)
                if sequence.computed == 0:  # preempted since the pass was scheduled
                    self.waiting.remove(sequence)
        if finished:
            self.running = [s for s in self.running if s.generated < s.request.output]
        return yielded

    def _start(self, sequence: Sequence, tokens: int) -> Chunk:
        context = sequence.computed
        sequence.computed += tokens
        self.free_blocks -= self.limits.blocks_of(sequence.computed) - self.limits.blocks_of(context)
        yields = sequence.computed == sequence.length
        sequence.pending += yields
        return Chunk(sequence, tokens, context, yields)

    def _preempt_last(self) -> Sequence:
        sequence = self.running.pop()
        self.free_blocks += self.limits.blocks_of(sequence.computed)
        sequence.computed = 0
        sequence.preemptions += 1
        self.waiting.appendleft(sequence)
        return sequence
