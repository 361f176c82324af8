# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Check that a recipe's scalings do not change K, V and states, so that the variants can share one KV cache.

Scales may move from a norm into all linears that read it: q, k and v then compute the same. They may move
from up_proj into down_proj, which only the residual stream follows. They may not move out of v_proj (into
o_proj) or k_proj, nor into a norm of the heads: each such model is right on its own cache, and wrong on the
other variants'. The same holds for a state (linear attention, state spaces, short convolutions): scales move
from a norm into all projections in front of it, gates included, and not out of a projection or a convolution.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

SHARED_CACHE = (
    "would make this variant's KV cache another than that of the variants it is to share one cache with"
)

_LAYER = "model.layers.0."
_UP, _DOWN = "mlp.up_proj", "mlp.down_proj"
_CACHED = {
    "self_attn.v_proj": "scales V",
    "self_attn.k_proj": "scales K",
    "self_attn.q_proj": "scales Q, and K in return",
    "self_attn.qkv_proj": "scales Q, K and V",
    "self_attn.k_norm": "scales K",
    "self_attn.q_norm": "scales Q, and K in return",
    "linear_attn.in_proj_qkvz": "scales the state",
    "linear_attn.in_proj_qkv": "scales the state",
    "linear_attn.in_proj_ba": "changes what the state forgets",
    "linear_attn.in_proj_a": "changes what the state forgets",
    "linear_attn.in_proj_b": "scales what goes into the state",
    "linear_attn.conv1d": "scales the state",
    "mamba.in_proj": "scales the state",
    "mamba.conv1d": "scales the state",
    "mamba.x_proj": "scales the state",
    "mamba.dt_proj": "changes what the state forgets",
    "mixer.in_proj": "scales the state",
    "mixer.conv1d": "scales the state",
    "conv.in_proj": "scales the state",
    "conv.conv": "scales the state",
}
"""Module -> how moving scales out of it changes the KV cache."""
_CONVOLUTIONS = ("linear_attn.conv1d", "mamba.conv1d", "mixer.conv1d", "conv.conv")
_UNBALANCED = {
    "self_attn.o_proj": "has no linear behind it that could take the scales back",
    "mlp.gate_proj": "is not linear in what follows it",
    "mlp.down_proj": "has no linear behind it that could take the scales back",
    "linear_attn.out_proj": "has no linear behind it that could take the scales back",
    "linear_attn.in_proj_z": "is not linear in what follows it",
}
"""Module -> why moving scales out of it changes what the model computes."""


def matches(name: str, target: str) -> bool:
    """Whether a name equals the target, or matches the regular expression after ``re:``."""
    return bool(re.match(target[3:], name)) if target.startswith("re:") else name == target


def check_mapping(balance: Sequence[str], smooth: str) -> str | None:
    """Return why a mapping from ``smooth`` to the ``balance`` linears is refused; None if it is not."""
    for name, effect in (_CACHED | _UNBALANCED).items():
        if _may_match(name, smooth):
            fatal = SHARED_CACHE if name in _CACHED else "would change what the model computes"
            return (
                f"remove the mapping from '{smooth}': smoothing {name.split('.')[1]} {effect}, which {fatal};"
                " scales may move from a norm into all linears that read it, and from up_proj into down_proj"
            )
    if _may_match(_UP, smooth) and not all(_may_match(_DOWN, name) for name in balance):
        return f"give '{smooth}' the one linear down_proj, whose input is all that it scales"
    if not _may_match(_UP, smooth) and any(_may_match(_DOWN, name) for name in balance):
        return f"smooth down_proj behind up_proj, not behind '{smooth}'"
    return None


def check_targets(targets: Sequence[str]) -> str | None:
    """Return why the targets are refused, if they match embeddings or attention itself; else None."""
    for target in targets:
        if target == "Embedding" or _may_match("embed_tokens", target, layer="model."):
            return f"remove '{target}': embeddings stay in 16 bit, since the variants share them"
        if target.endswith("Attention") or _may_match("self_attn", target):
            return f"remove '{target}': quantised attention {SHARED_CACHE}; name its linears"
        if target == "Conv1d" or any(_may_match(name, target) for name in _CONVOLUTIONS):
            return f"remove '{target}': a quantised convolution {SHARED_CACHE}, since it writes a state"
    return None


def _may_match(name: str, target: str, layer: str = _LAYER) -> bool:
    if target.startswith("re:"):
        return matches(layer + name, target)
    return target == name or target.endswith(f".{name}")
