# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Heads that predict further tokens (MTP): which classes have them, and what vLLM's draft classes load."""

from typing import Any, NamedTuple

from flexquant.checkpoint.built_model import Shapes, one_by_one, written_or_default
from flexquant.checkpoint.model_config import JsonObject, count_layers, text_config
from flexquant.checkpoint.module_names import DRAFTS, decoder_layer, layer_number
from flexquant.checkpoint.safetensors_io import Tensors
from flexquant.checkpoint.schemes import FLOAT_DTYPES, logical_shapes
from flexquant.errors import FlexQuantError


class Heads(NamedTuple):
    """The heads of a class: decoder layers, with norms and a projection beside attention and MLP.

    In names, ``{i}`` is a head's number, ``{n}`` that of a layer behind the last, ``{}`` the layer's prefix.
    """

    layer: str
    beside: str
    """Norms [hidden] and a projection [hidden, 2 * hidden]."""
    number: str = "num_nextn_predict_layers"
    """Key of the config with the number of heads; vLLM reads one head if there is no such key."""
    is_dense: bool = False
    """Whether the layer never has experts; otherwise its MLP is as the last layer's."""
    looked_for: str = ""
    """Prefix by which vLLM looks for the layer in a ``quantization_config``; empty for its own."""


NORMS = "{}input_layernorm {}post_attention_layernorm "
BEHIND = Heads("model.layers.{n}.", NORMS + "{}enorm {}hnorm {}shared_head.norm {}eh_proj")
ERNIE = "model.mtp_emb_norm.{i} model.mtp_hidden_norm.{i} model.mtp_linear_proj.{i}"
MIMO = NORMS + "{}token_layernorm {}hidden_layernorm {}final_layernorm {}input_proj"
MIMO_V2 = "{}input_layernorm {}pre_mlp_layernorm {}enorm {}hnorm {}final_layernorm {}eh_proj"
MTP = Heads("mtp.layers.{i}.", NORMS + "mtp.norm mtp.pre_fc_norm_hidden mtp.pre_fc_norm_embedding mtp.fc")
NOT_CHECKED = Heads("", "")
FAMILIES = {
    "BailingMoeV2_5ForCausalLM BailingMoeV3ForCausalLM DeepseekV32ForCausalLM DeepseekV4ForCausalLM "
    "Dots3NoteForCausalLM Glm5NextForCausalLM GlmMoeDsaForCausalLM HYV3ForCausalLM HYV4ForCausalLM "
    "LongcatFlashForCausalLM MiniMaxM3SparseForCausalLM NemotronHForCausalLM NemotronHPuzzleForCausalLM "
    "PanguUltraMoEForCausalLM Qwen4ExpForCausalLM Step3p5ForCausalLM": NOT_CHECKED,
    "DeepseekV3ForCausalLM Glm4MoeForCausalLM Glm4MoeLiteForCausalLM": BEHIND,
    "Ernie4_5_MoeForCausalLM": Heads(
        "model.mtp_block.{i}.", NORMS + ERNIE, is_dense=True, looked_for=BEHIND.layer
    ),
    "ExaoneMoEForCausalLM ExaoneMoeForCausalLM": MTP._replace(is_dense=True),
    "MiMoForCausalLM": Heads("model.mtp_layers.{i}.", MIMO, looked_for=BEHIND.layer),
    "MiMoV2FlashForCausalLM MiMoV2ForCausalLM": Heads("model.mtp.layers.{i}.", MIMO_V2, "", is_dense=True),
    "Qwen3NextForCausalLM": MTP,
    "Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM "
    "Qwen3_5MoeForConditionalGeneration": MTP._replace(number="mtp_num_hidden_layers"),
}
HEADS = {architecture: heads for names, heads in FAMILIES.items() for architecture in names.split()}
"""Architecture -> its heads; vLLM has draft classes for no other text model. Those served are checked."""


def drafts(name: str, architecture: str, num_layers: int) -> bool:
    """Whether a module or tensor belongs to a head of the class, in a model of ``num_layers`` layers."""
    heads = HEADS.get(architecture)
    is_behind = heads in (BEHIND, NOT_CHECKED) and (layer_number(name) or 0) >= num_layers
    return is_behind or (heads not in (None, BEHIND) and DRAFTS.search(name) is not None)


def check_draft_heads(config: JsonObject, tensors: Tensors, owner: str) -> None:
    """Raise FlexQuantError, naming the tensor, unless vLLM has all layers, and all heads if there are any."""
    architecture, num_layers, text = config["architectures"][0], count_layers(config), text_config(config)
    if (heads := HEADS.get(architecture)) == NOT_CHECKED:
        return
    stated = written_or_default(text, heads.number) if heads else 0
    number = stated if isinstance(stated, int) else int(heads is not BEHIND)
    for name in tensors:
        is_behind = (layer_number(name) or 0) >= num_layers + number * (heads is BEHIND)
        if is_behind or (heads is None and DRAFTS.search(name)):
            read = f"{num_layers} decoder layers, counted from 0, and {number} heads"
            problem = f"vLLM reads {read} that predict further tokens (MTP) of this {architecture}"
            advice = "correct config.json, or take a checkpoint without this tensor"
            raise FlexQuantError(f"{owner} has '{name}', and {problem}; {advice}")
    parameters = one_by_one(logical_shapes(tensors))
    found = {name: shape for name, shape in parameters.items() if drafts(name, architecture, num_layers)}
    if heads is None or not found:
        return
    layers: dict[int, Shapes] = {index: {} for index in range(num_layers)}
    for name, shape in parameters.items():
        if (match := decoder_layer(name)) and name not in found:
            layers[int(match["index"])][name[match.end() :]] = shape
    dense = [of for of in layers.values() if not any(".experts." in name for name in of)]
    like = {"self_attn.": [*layers.values()], "mlp.": dense if heads.is_dense else [layers[num_layers - 1]]}
    hidden: Any = written_or_default(text, "hidden_size")
    for i in range(number):
        layer = heads.layer.format(i=i, n=num_layers + i)
        modules = heads.beside.replace("{}", layer).format(i=i).split()
        wide = (hidden, 2 * hidden)
        expected: Shapes = {f"{m}.weight": (hidden,) if "norm" in m else wide for m in modules}
        for part, of_body in like.items():  # one of these, the most similar
            named = [{layer + n: s for n, s in of.items() if n.startswith(part)} for of in of_body]
            misses = {len(names.items() - found.items()): names for names in named if names}
            expected |= misses[min(misses)] if misses else {}
        for name, shape in expected.items():
            if (stored := found.get(name)) != shape:
                what = "lacks" if stored is None else f"has {list(stored)} as the shape of"
                problem = f"{owner} {what} '{name}', or a part of it, and vLLM loads {list(shape)} there"
                use = "for the heads that predict further tokens (MTP)"
                advice = "download or quantise the model again, or take a checkpoint without these heads"
                raise FlexQuantError(f"{problem} {use}; {advice}")


def with_heads_ignored(section: JsonObject, config: JsonObject, tensors: Tensors) -> JsonObject:
    """Return a ``quantization_config`` that also ignores the linears of heads in 16 bit by vLLM's names."""
    heads, stated = HEADS.get(config["architectures"][0]), section.get("ignore") or []
    before = heads.layer.partition("{")[0] if heads and heads.looked_for else None
    if heads is None or before is None or not section.get("config_groups") or not isinstance(stated, list):
        return section
    ignored = [*stated]
    for name, ref in tensors.items():
        i, _, module = name.removeprefix(before).removesuffix(".weight").partition(".")
        is_linear = name.startswith(before) and name.endswith("_proj.weight") and ref.dtype in FLOAT_DTYPES
        if is_linear and i.isdigit():
            ignored.append(heads.looked_for.format(n=count_layers(config) + int(i)) + module)
    return section | {"ignore": [*dict.fromkeys(ignored)]}
