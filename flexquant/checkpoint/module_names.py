# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What the names of modules tell: the decoder layer that they lie in, and which linears run as one."""

from __future__ import annotations

import re

LAYER = re.compile(r"^(?P<stack>(?:.*?\.)?(?:layers|blocks|h)\.)(?P<index>\d+)\.")
"""A decoder layer in the name of a module or tensor inside it."""
EXPERTS = re.compile(r"^.*\.experts(?=\.)")
"""The module that holds a layer's routed experts, in the name of a module or tensor inside it."""
LATENT_UP = re.compile(r"^.*\.self_attn\.kv_b_proj(?=\.)")
"""The linear that expands multi-head latent attention's cache, in the name of a module or tensor inside it.

vLLM's attention layer holds it, and all variants have that layer in common.
"""
OTHER_TOWERS = re.compile(r"vision|visual|audio|image|mtp", re.IGNORECASE)
"""Found in the name of a stack of layers that is not the language model's decoder."""
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Linears that vLLM runs as one, by the last part of their names; they need one scheme."""


def decoder_layer(name: str) -> re.Match[str] | None:
    """Return what LAYER matches in a name; None outside of the layers of the language model's decoder."""
    match = LAYER.match(name)
    return None if match is None or OTHER_TOWERS.search(match["stack"]) else match


def fused_name(linear: str) -> str:
    """Return the name of the linear that vLLM runs ``linear`` in: ``...qkv_proj`` for q, k and v."""
    parent, dot, leaf = linear.rpartition(".")
    return f"{parent}{dot}{FUSED.get(leaf, leaf)}"
