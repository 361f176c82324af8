# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Estimate how long a pass of several sequences takes from the measured times of simple passes.

The measured passes (:mod:`flexquant.policy.pass_times`) are decode passes in which every sequence has C
tokens in the KV cache, and prefill passes of one prompt with an empty KV cache. Everything but attention
depends on the number of tokens in the pass only. Attention is corrected for: c is the number of a sequence's
tokens in the KV cache before the pass, q the number of its tokens in the pass.

    decode of s sequences    decode(s) + k * (sum of c - s * C)
    n tokens otherwise       prefill(n) + k * (sum of c over the sequences with q = 1)
                                        + p * (sum of q * c + q^2 / 2 over the others - n^2 / 2)

Decode attention is bound by reading the KV cache; k, the time of one more token in it, was measured. Prefill
attention is bound by arithmetic on pairs of a query and a key: one prompt of n tokens has n^2 / 2 pairs,
several prompts in one pass have fewer, and later chunks of a long prompt have more. The time p of a pair is
the second derivative of a + b n + p n^2 / 2, fitted to the prefill times of the larger sizes, where
arithmetic bounds everything else too. p lies between 0 and k, since decode reads each key for one query only.
This upper bound does not apply if k is 0, because k is then smaller than its noise.

A pass that is padded to the size of a CUDA graph has more tokens than its sequences: s and n count the
padding, which has no context and no pairs.

A pass never takes less than a part of it would alone: one decoding sequence without context, or the longest
chunk as a prompt of its own.
"""

from __future__ import annotations

import numpy as np

from flexquant.errors import FlexQuantError
from flexquant.planning.scheduler import Batch
from flexquant.policy.pass_times import Curve, PassTimes
from flexquant.policy.plans import Plan

FIT_RANGE = 16
"""The curvature is fitted to the sizes of at least 1 / FIT_RANGE of the largest."""
FIT_SIZES = 4
"""Least number of sizes that determine the three terms; with fewer, a pair is taken to cost nothing."""


class PassCost:
    """Times of passes of any kind, in seconds."""

    def __init__(self, times: PassTimes) -> None:
        """Raise FlexQuantError for times in which the context alone costs more than the whole pass."""
        self.times = times
        curvature = sum(_curvature(curve) for curve in times.prefill.values()) / len(times.prefill)
        self.pair_seconds = max(0.0, curvature)
        if times.context_seconds > 0:
            self.pair_seconds = min(self.pair_seconds, times.context_seconds)
        self._simple: dict[tuple[str, bool, int], float] = {}
        context = times.context * times.context_seconds
        for variant in times.variants:
            one = times.seconds((variant,), "decode", 1)
            if one <= context:
                raise FlexQuantError(
                    f"the times of '{variant}' contradict each other: a decode pass of one sequence takes "
                    f"{1e3 * one:.4g} ms, but its {times.context} tokens of context alone "
                    f"{1e3 * context:.4g} ms (context_ns); measure again with 'flexquant tune'"
                )

    def seconds(self, plan: Plan, phase: str, batch: Batch, padded: int) -> float:
        """Return the time of a pass of ``padded`` tokens, the batch's tokens and padding together.

        ``phase`` is what :func:`flexquant.planning.replaying.phase_of` returns.
        """
        context_seconds = self.times.context_seconds
        if phase == "decode":
            contexts = sum(chunk.context for chunk in batch)
            measured = self.times.context * padded
            return max(
                self._time(plan, True, padded) + context_seconds * (contexts - measured),
                self._time(plan, True, 1) - context_seconds * self.times.context,
            )
        contexts = longest = 0
        pairs = 0.0
        for _, tokens, context, _ in batch:
            if tokens == 1:
                contexts += context
            else:
                pairs += tokens * (context + tokens / 2)
                longest = max(longest, tokens)
        seconds = self._time(plan, False, padded) + context_seconds * contexts
        return max(
            seconds + self.pair_seconds * (pairs - padded * padded / 2), self._time(plan, False, longest)
        )

    def _time(self, plan: Plan, decode: bool, size: int) -> float:
        key = plan.name, decode, size
        if key not in self._simple:
            self._simple[key] = self.times.seconds(plan.layers, "decode" if decode else "prefill", size)
        return self._simple[key]


def _curvature(curve: Curve) -> float:
    """Return the second derivative of a + b n + p n^2 / 2 fitted to a curve, by relative least squares."""
    largest = max(curve)
    sizes = np.array([size for size in curve if size * FIT_RANGE >= largest], dtype=float)
    if len(sizes) < FIT_SIZES:
        return 0.0
    seconds = np.array([curve[int(size)].median for size in sizes])
    x = sizes / largest
    terms = np.stack([np.ones_like(x), x, x * x / 2]) / seconds
    coefficients = np.linalg.lstsq(terms.T, np.ones_like(x), rcond=None)[0]
    return float(coefficients[2]) / largest**2
