# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Small checkpoints of compressed-tensors with any settings, and random settings for them."""

import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.utils.match import is_match
from safetensors.torch import save_file

from tests.checkpoints import MIXTURES, StateDict, base_config, byte_tokenizer, random_state_dict

Settings = dict[str, Any]
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True}
BY_CHANNEL, BY_TENSOR, BY_TOKEN = {"strategy": "channel"}, {"strategy": "tensor"}, {"strategy": "token"}
IN_BLOCKS = {"strategy": "block", "block_structure": [32, 32]}
DYNAMIC, ASYMMETRIC = {"dynamic": True}, {"symmetric": False}
INT, FLOAT, PACKED = "int-quantized", "float-quantized", "pack-quantized"


def in_groups(size: int) -> Settings:
    return {"strategy": "group", "group_size": size}


SCHEMES: Mapping[str, tuple[Settings, Settings | None, str]] = {
    "w8a8": (INT8 | BY_CHANNEL, INT8 | BY_TOKEN | DYNAMIC, INT),
    "w8a8 by tensor": (INT8 | BY_TENSOR, INT8 | BY_TOKEN | DYNAMIC, INT),
    "w8a8 static": (INT8 | BY_CHANNEL, INT8 | BY_TENSOR, INT),
    "w8a8 static with zero points": (INT8 | BY_CHANNEL, INT8 | BY_TENSOR | ASYMMETRIC, INT),
    "w8a16": (INT8 | BY_CHANNEL, None, PACKED),
    "w4a16": (INT4 | in_groups(64), None, PACKED),
    "w4a16 in 32": (INT4 | in_groups(32), None, PACKED),
    "w4a16 by channel": (INT4 | BY_CHANNEL, None, PACKED),
    "w4a16 with zero points": (INT4 | in_groups(64) | ASYMMETRIC, None, PACKED),
    "fp8": (FP8 | BY_CHANNEL, FP8 | BY_TOKEN | DYNAMIC, FLOAT),
    "fp8 static": (FP8 | BY_TENSOR, FP8 | BY_TENSOR, FLOAT),
    "fp8 in blocks": (FP8 | IN_BLOCKS, FP8 | in_groups(32) | DYNAMIC, FLOAT),
    # What vLLM has no class for:
    "w8 alone, not packed": (INT8 | BY_CHANNEL, None, INT),
    "w4a16, not packed": (INT4 | in_groups(64), None, INT),
    "w8a16 by tensor": (INT8 | BY_TENSOR, None, PACKED),
    "w8a8 with zero points": (INT8 | BY_CHANNEL | ASYMMETRIC, INT8 | BY_TOKEN | DYNAMIC, INT),
    "fp8 static by channel with zero points": (FP8 | BY_CHANNEL, FP8 | BY_TENSOR | ASYMMETRIC, PACKED),
    "w4a16 in 48": (INT4 | in_groups(48), None, PACKED),
}


@dataclass(frozen=True)
class Section:
    """A checkpoint's settings, and where its tensors are not stored as these say."""

    groups: Sequence[tuple[Sequence[str], str]]
    """(Targets, scheme) of each group."""
    ignore: Sequence[str] = ("lm_head",)
    architecture: str = "qwen2"
    stored: Mapping[str, str | None] = field(default_factory=dict)
    """Expression of modules -> the scheme in which they are stored; None: 16 bit."""
    keys: Settings = field(default_factory=dict)
    """More keys of the settings."""
    model: Settings = field(default_factory=dict)
    without: str = "^$"
    """Expression of tensors that are left out."""
    added: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Names and shapes of more tensors, of float32."""

    def settings(self) -> Settings:
        groups = {}
        for number, (targets, scheme) in enumerate(self.groups):
            weights, inputs, form = SCHEMES[scheme]
            group = {"targets": list(targets), "weights": weights, "input_activations": inputs}
            groups[f"group_{number}"] = group | {"format": form}
        forms = {group["format"] for group in groups.values()}
        found = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
        found["format"] = forms.pop() if len(forms) == 1 else "mixed-precision"
        return found | {"config_groups": groups, "ignore": list(self.ignore), **self.keys}

    def scheme_of(self, module: str) -> str | None:
        """Return the scheme in which a module is stored: as compressed-tensors reads the settings."""
        for pattern, scheme in self.stored.items():
            if re.search(pattern, module):
                return scheme
        kind = torch.nn.Embedding if module.endswith("embed_tokens") else torch.nn.Linear
        torch_module = kind(1, 1, device="meta")
        if is_match(module, torch_module, self.ignore):
            return None
        by_name = [s for targets, s in self.groups if is_match(module, torch.nn.Identity(), targets)]
        by_class = [s for targets, s in self.groups if is_match(module, torch_module, targets)]
        return next(iter(by_name + by_class), None)

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        config = base_config(self.architecture, **self.model)
        state, config.architectures = state_of(self.architecture, json.dumps(self.model))
        tensors: StateDict = {}
        for name, tensor in state.items():
            module = name.removesuffix(".weight")
            scheme = self.scheme_of(module) if name != module and tensor.ndim == 2 else None
            parts = {} if scheme is None else stored_in(scheme, tensor)
            tensors |= {f"{module}.{part}": t for part, t in parts.items()} or {name: tensor}
        tensors = {name: t for name, t in tensors.items() if not re.search(self.without, name)}
        tensors |= {name: torch.ones(tuple(shape)) for name, shape in self.added.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        document = config.to_dict() | {"quantization_config": self.settings()}
        (folder / "config.json").write_text(json.dumps(document))
        byte_tokenizer(config).save_pretrained(folder)
        return folder


@cache
def state_of(architecture: str, model: str) -> tuple[StateDict, list[str]]:
    state, name = random_state_dict(base_config(architecture, **json.loads(model)))
    return state, [name]


def stored_in(scheme: str, weight: torch.Tensor) -> StateDict:
    """Return a linear's tensors in a scheme, all weights 0."""
    weights, inputs, form = SCHEMES[scheme]
    rows, columns = weight.shape
    groups = math.ceil(columns / weights.get("group_size", columns))
    scale = {"tensor": [1], "block": [math.ceil(rows / 32), math.ceil(columns / 32)]}
    found = {"weight_scale": torch.full(scale.get(weights["strategy"], [rows, groups]), 0.01).bfloat16()}
    bits = weights["num_bits"]
    if form == PACKED:
        found |= {"weight_packed": torch.zeros(rows, math.ceil(columns * bits / 32), dtype=torch.int32)}
        found |= {"weight_shape": torch.tensor([rows, columns])}
        zero_points = torch.zeros(math.ceil(rows * bits / 32), groups, dtype=torch.int32)
    else:
        dtype = torch.int8 if weights["type"] == "int" else torch.float8_e4m3fn
        found |= {"weight": torch.zeros(rows, columns, dtype=dtype)}
        zero_points = torch.zeros(rows, groups, dtype=torch.int8)
    if not weights["symmetric"]:
        found |= {"weight_zero_point": zero_points}
    if inputs and not inputs.get("dynamic"):
        found |= {"input_scale": torch.full([1], 0.1)}
        if not inputs["symmetric"]:
            found |= {"input_zero_point": torch.zeros(1, dtype=torch.int8)}
    return found


TARGETS = (
    *("re:.*q_proj", "re:.*[qkv]_proj", "re:.*qkv_proj", "re:.*q.*_proj", "re:.*(gate|up)_proj$"),
    *("re:.*gate_proj", "re:.*down_proj", "re:.*mlp.*", "re:.*self_attn", "re:.*layers\\.0\\."),
    *("re:.*layers\\.1\\.mlp", "model.layers.1.self_attn.k_proj", "model.layers.0.mlp.up_proj"),
    *("linear", "Qwen2Attention", "lm_head"),
)
OF_EXPERTS = (
    *("re:.*experts\\.", "re:.*experts\\.0\\.", "re:.*experts\\.1\\.down_proj"),
    *("re:.*experts.*(gate|up)_proj", "re:.*shared_expert\\.", "re:.*w[13]$", "re:.*w2", "re:.*\\.gate$"),
)
ROUTERS = "re:.*\\.(shared_expert_)?gate$"


def random_section(seed: int) -> Section:
    """Return settings that a seed chooses."""
    dice = random.Random(seed)
    architecture = dice.choice(["qwen2", "qwen2", "llama", "qwen2_moe", "mixtral"])
    pool = (*TARGETS, *(OF_EXPERTS if architecture in MIXTURES else ()))
    schemes = list(SCHEMES)[: dice.choice([3, 12, 12, 18])]
    number = dice.randint(0, 2)
    groups = [(dice.sample(pool, dice.randint(1, 3)), dice.choice(schemes)) for _ in range(number)]
    groups.insert(dice.randint(0, len(groups)), (["Linear"], dice.choice(schemes)))
    if dice.random() < 0.2 and len(groups) > 1:
        groups = [group for group in groups if group[0] != ["Linear"]]
    ignore = dice.sample(pool, dice.choice([0, 0, 0, 1, 2]))
    ignore += ["lm_head"] * (dice.random() < 0.9) + [ROUTERS] * (dice.random() < 0.9)
    stored: dict[str, str | None] = {r"\.(shared_expert_)?gate$": None} if dice.random() < 0.9 else {}
    if dice.random() < 0.3:
        stored[dice.choice(pool).removeprefix("re:")] = dice.choice([None, *schemes])
    return Section(groups, ignore, architecture, stored, model={"tie_word_embeddings": dice.random() < 0.3})
