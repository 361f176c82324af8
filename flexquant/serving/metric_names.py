# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Define the names of FlexQuant's metrics, for the worker that counts and for readers."""

from __future__ import annotations

FORWARD = "flexquant:forward"
TOKENS = "flexquant:tokens"
PADDED_TOKENS = "flexquant:padded_tokens"
SECONDS = "flexquant:forward_seconds"
SIZE = "flexquant:forward_size"
REPLAYS = "flexquant:graph_replays"
WEIGHT_BYTES = "flexquant:weight_bytes"
POLICY = "flexquant:policy_info"
HELP = {
    FORWARD: "Forward passes of vLLM's scheduler.",
    TOKENS: "Tokens of these passes, those that the scheduler asked for.",
    PADDED_TOKENS: "Tokens of these passes with padding.",
    SECONDS: "Time of these passes, from the description of the batch to the logits.",
    SIZE: "Sequences of these passes in decode, else tokens, both without padding.",
    REPLAYS: "Of these passes those that ran from CUDA graphs.",
    WEIGHT_BYTES: "Bytes of weights on a rank, as kernels keep them; 'shared' by several variants.",
    POLICY: "1 for the policy that routes, 0 for one that did before it.",
}
"""Name of a metric -> its help text; names of counters lack the ``_total`` that Prometheus appends."""
SIZE_BUCKETS = (1, 2, 3, *(factor << power for power in range(1, 13) for factor in (2, 3)), 1 << 14)
"""Upper ends of the buckets of SIZE: 1, 2, 3, 4, 6, 8, 12, 16, ..., 8192, 12288, 16384."""
