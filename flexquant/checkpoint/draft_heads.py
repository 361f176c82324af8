# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Heads that predict further tokens (MTP): which classes have them, and what vLLM's draft classes load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from flexquant.checkpoint.built_model import written_or_default
from flexquant.checkpoint.model_config import JsonObject, count_layers, text_config
from flexquant.checkpoint.module_names import DRAFTS, decoder_layer, layer_number
from flexquant.errors import FlexQuantError

Shapes = Mapping[str, tuple[int, ...]]


class Heads(NamedTuple):
    """The heads of a class: decoder layers, with norms and a projection beside attention and MLP."""

    layer: str
    """Prefix of a head's layer; ``{i}`` is the head's number, ``{n}`` the layer's, behind the last."""
    beside: str
    """Norms [hidden] and projections [hidden, 2 * hidden], by name; ``{}`` is the layer's prefix."""
    count: str = "num_nextn_predict_layers"
    """Key of the config with the number of heads."""
    is_dense: bool = False
    """Whether the layer has no experts, though the model's have; otherwise its MLP is as the last layer's."""
    most: int = 99
    """Number of heads that vLLM loads at most."""


NORMS = "{}input_layernorm {}post_attention_layernorm "
BEHIND = Heads("model.layers.{n}.", NORMS + "{}enorm {}hnorm {}shared_head.norm {}eh_proj")
MTP = Heads("mtp.layers.{i}.", NORMS + "mtp.norm mtp.pre_fc_norm_hidden mtp.pre_fc_norm_embedding mtp.fc")
ERNIE = "model.mtp_emb_norm.{i} model.mtp_hidden_norm.{i} model.mtp_linear_proj.{i}"
MIMO = "{}token_layernorm {}hidden_layernorm {}final_layernorm {}input_proj"
MIMO_V2 = "{}input_layernorm {}pre_mlp_layernorm {}enorm {}hnorm {}final_layernorm {}eh_proj"
HEADS = {
    "Ernie4_5_MoeForCausalLM": Heads("model.mtp_block.{i}.", NORMS + ERNIE, is_dense=True),
    "MiMoForCausalLM": Heads("model.mtp_layers.{i}.", NORMS + MIMO),
    "Qwen3NextForCausalLM": MTP,
    **dict.fromkeys(("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"), BEHIND),
    **dict.fromkeys(("ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM"), MTP._replace(is_dense=True)),
    **dict.fromkeys(
        ("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"),
        Heads("model.mtp.layers.{i}.", MIMO_V2, is_dense=True, most=1),
    ),
    **{
        f"Qwen3_5{kind}For{task}": MTP._replace(count="mtp_num_hidden_layers")
        for kind in ("", "Moe")
        for task in ("CausalLM", "ConditionalGeneration")
    },
}
"""Served architecture -> its heads; vLLM has draft classes for no other."""


def drafts(name: str, architecture: str, num_layers: int) -> bool:
    """Whether a module or tensor belongs to a head of the class, in a model of ``num_layers`` layers."""
    heads = HEADS.get(architecture)
    if heads is None:
        return False
    if heads is not BEHIND:
        return DRAFTS.search(name) is not None
    return (layer_number(name) or 0) >= num_layers


def check_draft_heads(config: JsonObject, shapes: Shapes, owner: str) -> None:
    """Raise FlexQuantError, naming the tensor, unless vLLM's classes have all layers, and load all heads.

    ``shapes`` are those of a checkpoint's parameters, without quantisation, by name. A checkpoint may lack
    all heads.
    """
    architecture, num_layers = config["architectures"][0], count_layers(config)
    heads = HEADS.get(architecture)
    stated = written_or_default(text_config(config), heads.count) if heads else 0
    number = stated if isinstance(stated, int) else int(heads is not BEHIND)
    known = num_layers + number * (heads is BEHIND)
    for name in shapes:
        if (layer_number(name) or 0) >= known or (heads is None and DRAFTS.search(name)):
            raise FlexQuantError(
                f"{owner} has '{name}', and vLLM reads {num_layers} decoder layers, counted from 0, and "
                f"{number} heads that predict further tokens (MTP) of this {architecture}; correct "
                "config.json, or take a checkpoint without this tensor"
            )
    found = {name: s for name, s in _one_by_one(shapes) if drafts(name, architecture, num_layers)}
    if heads is None or not found:
        return
    body: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, shape in _one_by_one(shapes):
        if (match := decoder_layer(name)) and name not in found and "rotary_emb" not in name:
            body.setdefault(int(match["index"]), {})[name[match.end() :]] = shape
    for i in range(min(number, heads.most)):
        layer = heads.layer.format(i=i, n=num_layers + i)
        for name, shape in _expected(heads, body, found, layer, i):
            if (stored := found.get(name)) != shape:
                what = "lacks" if stored is None else f"has {list(stored)} as the shape of"
                raise FlexQuantError(
                    f"{owner} {what} '{name}', or a part of it, and vLLM loads {list(shape)} there for the "
                    "heads that predict further tokens (MTP); download or quantise the model again, or take "
                    "a checkpoint without any of these heads"
                )


def _one_by_one(shapes: Shapes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the parameters, each expert's apart, whether one tensor holds all experts or not."""
    for name, shape in shapes.items():
        experts, _, fused = name.rpartition(".")
        if len(shape) != 3 or fused not in ("gate_up_proj", "down_proj"):
            yield name, shape
            continue
        parts = ("gate_proj", "up_proj") if fused == "gate_up_proj" else (fused,)
        for expert in range(shape[0]):
            for part in parts:
                yield f"{experts}.{expert}.{part}.weight", (shape[1] // len(parts), shape[2])


def _expected(
    heads: Heads, body: Mapping[int, Shapes], found: Shapes, layer: str, i: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the parameters of head ``i``, whose layer has the prefix ``layer``, beside those of ``body``."""
    *_, hidden = body[max(body)]["input_layernorm.weight"]
    for module in heads.beside.replace("{}", layer).format(i=i).split():
        yield f"{module}.weight", (hidden,) if "norm" in module else (hidden, 2 * hidden)
    dense = [of for of in body.values() if not any(".experts." in name for name in of)]
    like = {"self_attn.": [*body.values()], "mlp.": dense if heads.is_dense else [body[max(body)]]}
    for part, layers in like.items():
        known = [{layer + name: s for name, s in of.items() if name.startswith(part)} for of in layers]
        misses = [sum(found.get(name) != s for name, s in of.items()) for of in known if of]
        yield from ([of for of in known if of][misses.index(min(misses))] if misses else {}).items()
