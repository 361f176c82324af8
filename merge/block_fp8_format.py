# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read a checkpoint in block FP8, as DeepSeek and Qwen publish it, as compressed-tensors names its tensors.

A linear has ``weight`` float8_e4m3fn [out, in] and ``weight_scale_inv`` [out / rows, in / columns], by which
its weights are multiplied. Activations are quantised as they arrive, in groups as wide as a block. AutoRound
exports the same tensors, with settings of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flexquant.checkpoint.loadable import COMPRESSED_TENSORS
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.safetensors_io import TensorRef
from flexquant.errors import FlexQuantError
from flexquant.merge.packed_formats import matrices_in_16_bit
from flexquant.merge.packed_settings import AUTO_ROUND

BLOCK_FP8 = "fp8"
SCALE = ".weight_scale_inv"
FP8_TYPES = ("fp", "fp8")
"""Values of AutoRound's ``data_type`` for FP8."""
AUTO_ROUND_BLOCKS: JsonObject = {
    "packing_format": "auto_round:fp8",
    "bits": 8,
    "sym": True,
    "act_bits": 8,
    "act_data_type": "fp",
    "act_sym": True,
    "act_dynamic": True,
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
}
"""AutoRound's settings of block FP8, as vLLM asks for them; what is not written has these values."""


def is_auto_round_fp8(section: JsonObject) -> bool:
    """Whether the settings are those of a checkpoint that AutoRound quantised to FP8, in blocks or not."""
    in_fp8 = "fp8" in str(section.get("packing_format")) or section.get("data_type") in FP8_TYPES
    return section.get("quant_method") in AUTO_ROUND and in_fp8


def from_auto_round_fp8(
    folder: Path, section: JsonObject, tensors: Mapping[str, TensorRef]
) -> tuple[JsonObject, dict[str, TensorRef]]:
    """Return what :func:`from_block_fp8` does, of AutoRound's export.

    Raises FlexQuantError, naming the settings, for FP8 that vLLM does not serve, and as it does.
    """
    block, extra = section.get("group_size"), section.get("extra_config") or {}
    wrong = [key for key, value in AUTO_ROUND_BLOCKS.items() if section.get(key, value) != value]
    if section.get("data_type") not in FP8_TYPES:
        wrong.append("data_type")
    if not isinstance(block, list) or len(block) != 2:
        wrong.append("group_size")
    elif section.get("act_group_size", block[0]) != block[0]:
        wrong.append("act_group_size")
    layers = extra.values() if isinstance(extra, dict) else [extra]
    if not all(isinstance(layer, dict) and layer.get("bits") == 16 for layer in layers):
        wrong.append("extra_config")
    if wrong:
        listed = ", ".join(f"{key} {section.get(key)!r}" for key in wrong)
        raise FlexQuantError(
            f"{folder} was exported by AutoRound in FP8 with {listed}; of its FP8 only blocks with dynamic "
            "activations and one setting for all layers are read: export it with the scheme FP8_BLOCK as "
            "auto_round:fp8, or as llm_compressor"
        )
    return from_block_fp8(folder, {"weight_block_size": block}, tensors)


def from_block_fp8(
    folder: Path, section: JsonObject, tensors: Mapping[str, TensorRef]
) -> tuple[JsonObject, dict[str, TensorRef]]:
    """Return the ``quantization_config`` and the tensors as compressed-tensors has them.

    No byte changes. Raises FlexQuantError for FP8 without blocks, with scales for activations, and for a
    weight without its scale or with two.
    """
    block = section.get("weight_block_size")
    sizes = block if isinstance(block, list) else []
    is_block = len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)
    if not is_block or section.get("activation_scheme", "dynamic") != "dynamic":
        raise FlexQuantError(
            f"{folder} is in FP8 with weight_block_size {block!r} and activation_scheme "
            f"{section.get('activation_scheme')!r}; only blocks with dynamic activations are read: quantise "
            "the model again, e.g. by 'flexquant quantize' with a recipe for FP8"
        )
    for name, ref in tensors.items():
        if name.endswith(".weight") and ref.dtype == "F8_E4M3" and f"{name}_scale_inv" not in tensors:
            raise FlexQuantError(f"{name}_scale_inv is missing in {folder}; get the checkpoint again")
        if _renamed(name) != name and _renamed(name) in tensors:
            raise FlexQuantError(
                f"{folder} has both {name} and {_renamed(name)}; a weight has one scale: get the checkpoint "
                "again"
            )
    # scale_fmt ue8m0 is left out: it has vLLM scale activations by powers of two where DeepGEMM multiplies,
    # which vLLM does by default for every checkpoint in block FP8.
    found = {_renamed(name): ref for name, ref in tensors.items()}
    quantised = {name.removesuffix(SCALE) for name in tensors if name.endswith(SCALE)}
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**number, "strategy": "block", "block_structure": block, "dynamic": False},
        "input_activations": {**number, "strategy": "group", "group_size": sizes[1], "dynamic": True},
        "format": "float-quantized",
    }
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(matrices_in_16_bit(tensors) - quantised),
    }, found


def _renamed(name: str) -> str:
    return f"{name.removesuffix(SCALE)}.weight_scale" if name.endswith(SCALE) else name
