# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What tools and people change in a checkpoint folder, as functions of the folder."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from flexquant.checkpoint.model_config import JsonObject
from tests.checkpoints import base_config, random_state_dict
from tests.foreign import AWQ_ORDER, gptq_tensors, packed

Edit = Callable[[Path], None]
SINGLE = "model.safetensors"
GEMV_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Each of eight neighbouring inputs -> its place in a word of AWQ's GEMV format."""


def both(*edits: Edit) -> Edit:
    def apply(folder: Path) -> None:
        for edit in edits:
            edit(folder)

    return apply


def edit_json(file: str, edit: Callable[[JsonObject], object]) -> Edit:
    def apply(folder: Path) -> None:
        path = folder / file
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        edit(content)
        path.write_text(json.dumps(content), encoding="utf-8")

    return apply


def update(json_file: str, /, **values: object) -> Edit:
    return edit_json(json_file, lambda content: content.update(values))


def section(**values: object) -> Edit:
    return edit_json("config.json", lambda content: content["quantization_config"].update(values))


tokenizer = partial(edit_json, "tokenizer.json")
config, generation, tokenizer_config = (
    partial(update, name) for name in ("config.json", "generation_config.json", "tokenizer_config.json")
)


def file(name: str, text: str) -> Edit:
    def apply(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return apply


def tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
    def apply(folder: Path) -> None:
        state = load_file(folder / SINGLE)
        edit(state)
        save_file({k: t.contiguous() for k, t in state.items()}, folder / SINGLE, metadata={"format": "pt"})

    return apply


def without(*patterns: str) -> Edit:
    """Drop the tensors with names in which one of the patterns is found."""

    def drop(state: dict[str, torch.Tensor]) -> None:
        found = [name for name in state if any(re.search(pattern, name) for pattern in patterns)]
        assert found
        for name in found:
            del state[name]

    return tensors(drop)


def renamed(name: str) -> Edit:
    return lambda folder: (folder / SINGLE).rename(folder / name) and None


def settings_in(name: str, **new_names: str) -> Edit:
    """Move the quantisation's settings into a file of their own, some of them under new names."""

    def move(content: JsonObject, folder: Path) -> None:
        found = content.pop("quantization_config")
        found.pop("quant_method")
        (folder / name).write_text(json.dumps({new_names.get(key, key): v for key, v in found.items()}))

    return lambda folder: edit_json("config.json", lambda content: move(content, folder))(folder)


def stored_in(dtype: str) -> Edit:
    """Store what is in bf16 in another dtype."""
    other = getattr(torch, dtype)

    @tensors
    def cast(state: dict[str, torch.Tensor]) -> None:
        state |= {key: t.to(other) for key, t in state.items() if t.dtype is torch.bfloat16}

    return both(cast, config(dtype=dtype))


in_half = stored_in("float16")


def zero_biases(state: dict[str, torch.Tensor]) -> None:
    """Add a bias of zeros to every GPTQ linear, as AutoGPTQ does."""
    for key in [key for key in state if key.endswith(".scales")]:
        state[key.replace(".scales", ".bias")] = torch.zeros(state[key].shape[1], dtype=torch.bfloat16)


def frequencies(state: dict[str, torch.Tensor]) -> None:
    for layer in range(2):
        state[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(16)


def reordered(state: dict[str, torch.Tensor]) -> None:
    """Put a linear's inputs into another order, as ``desc_act`` does."""
    key = "model.layers.1.self_attn.o_proj.g_idx"
    state[key] = state[key].flip(0)


def in_gemv(state: dict[str, torch.Tensor]) -> None:
    """Pack an AWQ checkpoint's linears as AutoAWQ's GEMV does: a word holds inputs of one output."""
    for module in [key.removesuffix(".qweight") for key in state if key.endswith(".qweight")]:
        for part in ("qweight", "qzeros"):
            nibbles = state[f"{module}.{part}"].unsqueeze(-1) >> torch.arange(0, 32, 4) & 15
            values = nibbles[..., AWQ_ORDER].flatten(1).T
            state[f"{module}.{part}"] = packed(pad(values, (0, -values.shape[1] % 8)), GEMV_ORDER)
        scales = state[f"{module}.scales"].T
        state[f"{module}.scales"] = pad(scales, (0, -scales.shape[1] % 8))


def packed_for_marlin(state: dict[str, torch.Tensor]) -> None:
    for key in [key for key in state if key.endswith(".qweight")]:
        state[f"{key.removesuffix('qweight')}B"] = state.pop(key)


def block_fp8(folder: Path, scale_fmt: str | None = None, columns: int = 32) -> None:
    """Quantise a 16-bit checkpoint to FP8 in blocks of 32 x ``columns``.

    ``scale_fmt`` ue8m0: by powers of two.
    """

    def quantise(state: dict[str, torch.Tensor]) -> None:
        for key in [key for key in state if key.endswith("_proj.weight")]:
            blocks = state[key].float().unflatten(0, (-1, 32)).unflatten(2, (-1, columns))
            scale = blocks.abs().amax((1, 3)) / 448
            if scale_fmt == "ue8m0":
                scale = scale.log2().ceil().exp2()
            state[key] = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
            state[f"{key}_scale_inv"] = scale

    tensors(quantise)(folder)
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, columns]}
    config(quantization_config=settings | ({"scale_fmt": scale_fmt} if scale_fmt else {}))(folder)


AUTO_ROUND_FP8 = {
    **{"quant_method": "auto-round", "packing_format": "auto_round:fp8", "fmt": "e4m3"},
    **{"data_type": "fp", "bits": 8, "group_size": [32, 32], "sym": True},
    **{"act_data_type": "fp", "act_bits": 8, "act_group_size": 32, "act_sym": True, "act_dynamic": True},
    **{"activation_scheme": "dynamic", "block_name_to_quantize": "model.layers"},
}


def auto_round_fp8(folder: Path) -> None:
    """Quantise a 16-bit checkpoint to FP8 in blocks of 32 x 32 as AutoRound exports it."""
    block_fp8(folder)
    config(quantization_config=AUTO_ROUND_FP8)(folder)


def requantised(
    pattern: str, *, bits: int = 4, group_size: int = 64, architecture: str = "llama", num_layers: int = 2
) -> Edit:
    """Quantise the linears of a small model's GPTQ checkpoint that a pattern matches in another way."""

    def quantise(state: dict[str, torch.Tensor]) -> None:
        original, _ = random_state_dict(base_config(architecture, num_layers))
        middle = 1 << (bits - 1)
        for module in [key.removesuffix(".qweight") for key in state if key.endswith(".qweight")]:
            if re.match(pattern, module):
                groups = original[f"{module}.weight"].float().unflatten(1, (-1, group_size))
                scales = (groups.abs().amax(2) / (middle - 0.5)).bfloat16()
                values = (groups / scales.float()[:, :, None]).round().clamp(-middle, middle - 1) + middle
                tensors = gptq_tensors(values.flatten(1), torch.full(scales.shape, middle), scales, bits=bits)
                state |= {f"{module}.{part}": tensor for part, tensor in tensors.items()}

    return tensors(quantise)


@partial(edit_json, "config.json")
def as_transformers_4(content: JsonObject) -> None:
    """Write a Llama config as transformers 4 did."""
    rope_theta = content.pop("rope_parameters")["rope_theta"]
    content |= {"rope_theta": rope_theta, "rope_scaling": None, "torch_dtype": content.pop("dtype")}
    content["transformers_version"] = "4.44.2"


def merges_as_strings(content: JsonObject) -> None:
    content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]


def swapped_tokens(content: JsonObject) -> None:
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def left_by_calibration(content: JsonObject) -> None:
    content["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {"strategy": {"Fixed": 8}, "direction": "Left", "pad_to_multiple_of": None}
    content["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "</s>"}


def cache_scales(state: dict[str, torch.Tensor]) -> None:
    for layer in range(2):
        for part in ("k_scale", "v_scale"):
            state[f"model.layers.{layer}.self_attn.{part}"] = torch.tensor(0.1)
