# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Say what an lm_head in INT8 would gain, by the bytes of weights that a decode step reads."""

from __future__ import annotations

from collections.abc import Mapping

from flexquant.checkpoint.module_names import EMBEDDINGS, EXPERTS, HEAD, layer_number
from flexquant.checkpoint.safetensors_io import TensorRef, total_bytes
from flexquant.checkpoint.schemes import FLOAT_DTYPES

LEAST_SHARE = 0.05
"""Share of a step's bytes from which on an lm_head is worth a sentence."""


def head_remark(head: float, layers: float) -> str:
    """Return the gain in a sentence; empty if it is small, or ``head`` is 0.

    ``head`` are the bytes of an lm_head in 16 bit, ``layers`` those that a step reads of decoder layers.
    """
    share = head / max(1, head + layers)
    if share <= LEAST_SHARE:
        return ""
    return (
        f"the lm_head in 16 bit is {share:.0%} of the weights that a decode step reads; with 'head: int8' in "
        f"the policy a step reads {1 - share / 2:.2f} of these bytes"
    )


def stored_head_remark(tensors: Mapping[str, TensorRef]) -> str:
    """Return :func:`head_remark` for a variant's ``tensors``, by original key; empty for experts."""
    if any(map(EXPERTS.match, tensors)):
        return ""
    embeddings = [
        ref for name, ref in tensors.items() if name.endswith(tuple(f"{e}.weight" for e in EMBEDDINGS))
    ]
    heads = [ref for name, ref in tensors.items() if HEAD.search(name)] or embeddings[:1]
    inside = {name: ref for name, ref in tensors.items() if layer_number(name) is not None}
    in_16_bit = all(ref.dtype in FLOAT_DTYPES for ref in heads)
    return head_remark(sum(ref.nbytes for ref in heads) if in_16_bit else 0, total_bytes(inside))
