# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""From vLLM's forward context to a route: what the pass holds, hence which plan runs it.

The phase is read from the attention metadata of the pass. On a CPU the query lengths are at hand, and all
three phases are told apart. On a GPU they live on the device, where reading them would stall it: only
``decode`` and not-``decode`` are told apart there, and ``check_distinguishable`` of
:mod:`flexquant.serving.config` has made sure that the policy needs no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexquant.errors import FlexQuantError
from flexquant.policy.rules import Phase

if TYPE_CHECKING:
    from flexquant.serving.vllm_api import ForwardContext


@dataclass(frozen=True)
class Pass:
    """What one forward pass holds."""

    phase: Phase
    tokens: int
    """Tokens in the pass, padding included."""
    sequences: int
    max_query_len: int
    """Most tokens that one sequence contributes."""


def read_pass(context: ForwardContext, tokens: int, tokens_per_sequence: int) -> Pass | None:
    """Describe the current pass of ``tokens`` padded tokens; None for vLLM's profiling and capture runs.

    ``tokens_per_sequence`` is what a decoding sequence contributes: 1, plus any speculated tokens. Raises
    :class:`FlexQuantError` for an attention backend that does not tell query lengths.
    """
    metadata: Any = context.attn_metadata
    if not metadata:
        return None
    first = next(iter(metadata.values()))
    if not hasattr(first, "max_query_len"):
        raise FlexQuantError(
            f"the attention backend's {type(first).__name__} does not tell query lengths, which routing "
            "needs; choose another one with --attention-backend, such as FLASH_ATTN or TRITON_ATTN"
        )
    longest = first.max_query_len
    starts = first.query_start_loc
    sequences = starts.shape[0] - 1
    phase: Phase
    if longest <= tokens_per_sequence:
        phase = "decode"
    elif starts.device.type == "cpu" and bool((starts.diff() <= tokens_per_sequence).any()):
        phase = "mixed"
    else:
        phase = "prefill"
    return Pass(phase, tokens, sequences, longest)
