# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The phase of a pass, read from the metadata that vLLM's CPU attention backend gives for it."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from vllm.forward_context import ForwardContext
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

from flexquant.serving.forward_pass import Pass, read_pass


def context_of(query_lengths: list[int]) -> ForwardContext:
    """The context of a pass to which each sequence contributes so many tokens, on top of 20 computed ones."""
    lengths = torch.tensor(query_lengths, dtype=torch.int32)
    metadata = CPUAttentionMetadata(
        num_actual_tokens=sum(query_lengths),
        max_query_len=max(query_lengths),
        query_start_loc=torch.tensor([0, *accumulate(query_lengths)], dtype=torch.int32),
        max_seq_len=20 + max(query_lengths),
        seq_lens=20 + lengths,
        block_table=torch.zeros(len(query_lengths), 2, dtype=torch.int32),
        slot_mapping=torch.arange(sum(query_lengths)),
        scheduler_metadata=None,
    )
    return ForwardContext(no_compile_layers={}, attn_metadata={"layer": metadata}, slot_mapping={})


@pytest.mark.parametrize(
    ("query_lengths", "tokens_per_sequence", "phase"),
    [
        ([1], 1, "decode"),
        ([1, 1, 1], 1, "decode"),
        ([7], 1, "prefill"),
        ([2, 64, 3], 1, "prefill"),
        ([1, 7], 1, "mixed"),
        ([7, 5, 1], 1, "mixed"),
        # With three speculated tokens, of which a sequence may have fewer.
        ([4, 4], 4, "decode"),
        ([4, 2], 4, "decode"),
        ([5, 64], 4, "prefill"),
        ([64, 4], 4, "mixed"),
    ],
)
def test_phases(query_lengths: list[int], tokens_per_sequence: int, phase: str) -> None:
    found = read_pass(context_of(query_lengths), 96, tokens_per_sequence)
    assert found == Pass(phase, 96, len(query_lengths), max(query_lengths))
