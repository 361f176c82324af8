# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Parse names of modules: their decoder layer, and which linears vLLM fuses; describe ranges of layers."""

import re
from collections.abc import Collection, Iterable, Mapping

STACKS = ("layers", "h")
"""Names that the list of decoder layers has in its module."""
LAYER = re.compile(r"^(?P<stack>(?:.*?\.)?(?:layers|blocks|h)\.)(?P<index>[0-9]{1,5})\.")
"""Matches the decoder layer in the name of a module or tensor inside it."""
EXPERTS = re.compile(r"^.*\.experts(?=\.)")
"""Matches the module of a layer's routed experts in the name of a module or tensor inside it."""
LATENT_UP = re.compile(r"^.*\.self_attn\.kv_b_proj(?=\.)")
"""Matches the linear that expands the latent cache, in a name inside it; vLLM's attention layer holds it."""
OTHER_TOWERS = re.compile(r"vision|visual|audio|image|mtp", re.IGNORECASE)
"""Matches in the name of a stack of layers that is not the language model's decoder."""
TOP = re.compile(r"^(?:model\.)?[^.]+(?=\.)")
"""Matches the outermost module below the model in a tensor's name."""
ATTENTION = re.compile(r"\.((self_)?(attn|attention)|mixer\.k_proj)\.")
DRAFTS = re.compile(r"(^|[._])mtp|nextn")
"""Matches in the name of a head that predicts further tokens (MTP), unless it is a layer behind the last."""
HEAD = re.compile(r"(^|\.)(lm_head|embed_out)(\.|$)")
"""Matches in the name of the lm_head, or of a tensor in it, wherever the model has it."""
HEAD_TARGET = re.compile(r"lm_head|ParallelLMHead")
"""Matches in a target of compressed-tensors that is for the lm_head."""
OF_TOKENS = ("embed_tokens", "embeddings", "embed_in", "word_embeddings", "wte")
"""Last parts of the names that embeddings of tokens have."""
EMBEDDINGS = (*OF_TOKENS, "wpe")
FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("w1", "w3"), "w13"),
    **dict.fromkeys(("in_proj_qkv", "in_proj_z"), "in_proj_qkvz"),
    **dict.fromkeys(("in_proj_b", "in_proj_a"), "in_proj_ba"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj"),
}
"""Last part of a linear's name -> the linear that vLLM fuses it into; fused linears need one scheme."""


def decoder_layer(name: str) -> re.Match[str] | None:
    """Return LAYER's match in a name; None outside of the language model's decoder layers."""
    match = LAYER.match(name)
    return None if match is None or OTHER_TOWERS.search(match["stack"]) else match


def layer_number(name: str) -> int | None:
    """Return the number of a module's or tensor's decoder layer; None outside of decoder layers."""
    match = decoder_layer(f"{name}.")
    return int(match["index"]) if match else None


def is_in(name: str, layers: Collection[int]) -> bool:
    """Whether a module or tensor lies in one of these decoder layers, or outside of all layers."""
    number = layer_number(name)
    return number is None or number in layers


def decoder_stacks(tensors: Iterable[str]) -> set[str]:
    """Return what precedes the number of layers, e.g. ``model.layers.``, in stacks that have attention."""
    inside = (decoder_layer(name) for name in tensors if ATTENTION.search(name))
    return {match["stack"] for match in inside if match and match["stack"][:-1].endswith(STACKS)}


def above(stack: str) -> str:
    """Return the prefix of the module that holds a stack of layers: ``model.`` for ``model.layers.``."""
    return stack[:-1].removesuffix(stack[:-1].rpartition(".")[2])


def tower(tensor: str, roots: Collection[str]) -> str | None:
    """Return the module that holds a tensor beside the language model (``roots``, lm_head), if any."""
    if tensor.startswith(tuple(roots)) or HEAD.search(tensor):
        return None
    found = TOP.match(tensor)
    return found[0] if found else None


def fused_name(linear: str) -> str:
    """Return the name of the linear that vLLM fuses ``linear`` into: ``...qkv_proj`` for q, k and v."""
    parent, dot, leaf = linear.rpartition(".")
    return f"{parent}{dot}{FUSED.get(leaf, leaf)}"


def layer_of(linear: str) -> str:
    """Return the name of the layer that vLLM makes of a linear and others: its experts, or what it fuses."""
    experts = EXPERTS.match(linear)
    return experts[0] if experts else fused_name(linear)


def is_for_heads(targets: Iterable[object]) -> bool:
    """Whether all ``targets`` of a config group name the lm_head."""
    return all(HEAD_TARGET.search(str(target)) for target in targets)


def ranges(numbers: Iterable[int]) -> list[range]:
    """Return the runs of consecutive numbers, ascending."""
    runs: list[range] = []
    for number in sorted(numbers):
        if runs and number == runs[-1].stop:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


def describe_range(run: range) -> str:
    """Return e.g. ``0-3``, or ``29`` for one layer."""
    return str(run.start) if len(run) == 1 else f"{run.start}-{run.stop - 1}"


def describe_ranges(numbers: Iterable[int]) -> str:
    """Return e.g. ``0-3,29``."""
    return ",".join(map(describe_range, ranges(numbers)))


def by_range(nbytes: Mapping[int | None, int]) -> dict[str, int]:
    """Return the bytes of each run of consecutive layers from the bytes by layer; None: outside of layers."""
    runs = ranges(number for number in nbytes if number is not None)
    sizes = {describe_range(run): sum(nbytes[number] for number in run) for run in runs}
    return sizes | ({"": nbytes[None]} if nbytes.get(None) else {})


def holder(tensor: str) -> str | None:
    """Return a tensor's module if one instance can serve all variants; in layers, EXPERTS and LATENT_UP."""
    if inside := EXPERTS.match(tensor) or LATENT_UP.match(tensor):
        return inside[0]
    return None if LAYER.search(tensor) else tensor.rpartition(".")[0]
