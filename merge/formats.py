# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Open a checkpoint of any supported format as a source of a merge, in the form of compressed-tensors.

Quantised values never change. Tensors that are stored in another form are converted whenever they are read,
so nothing is written before the merged checkpoint. Formats with packed weights are read in `packed_formats`,
AMD's Quark in `quark_format`, and block FP8, as DeepSeek and Qwen publish it, here: a linear has ``weight``
float8_e4m3fn [out, in] and ``weight_scale_inv`` [out / rows, in / columns], by which its weights are
multiplied. Activations are quantised as they arrive, in groups as wide as a block. AutoRound exports the same
tensors, with settings of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from flexquant.checkpoint.folder import (
    check_folder,
    confined_file,
    find_model,
    quantization_section,
    read_json,
    read_tensors,
)
from flexquant.checkpoint.loadable import COMPRESSED_TENSORS, is_sparse
from flexquant.checkpoint.model_config import ConfigGroup, JsonObject, QuantizedNumbers
from flexquant.checkpoint.safetensors_io import TensorRef
from flexquant.checkpoint.source import Source, cast_tensors, with_dtype
from flexquant.errors import FlexQuantError
from flexquant.merge.packed_formats import (
    PACKED_PARTS,
    compressed_tensors_section,
    from_packed_format,
    matrices_in_16_bit,
)
from flexquant.merge.packed_settings import AUTO_ROUND, PACKED_METHODS
from flexquant.merge.quark_format import QUARK, from_quark

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
FP8: QuantizedNumbers = {"num_bits": 8, "type": "float", "symmetric": True}


CACHE_SCALE = re.compile(r"\.([kv])_proj\.output_(scale|zero_point)$")
"""Matches the older names of the cache's scales."""


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
    group: ConfigGroup = {
        "targets": ["Linear"],
        "weights": {**FP8, "strategy": "block", "block_structure": sizes, "dynamic": False},
        "input_activations": {**FP8, "strategy": "group", "group_size": sizes[1], "dynamic": True},
        "format": "float-quantized",
    }
    ignored = matrices_in_16_bit(tensors) - quantised
    return compressed_tensors_section([group], "float-quantized", ignored), found


def _renamed(name: str) -> str:
    return f"{name.removesuffix(SCALE)}.weight_scale" if name.endswith(SCALE) else name


def open_source(name: str, folder: str | Path, dtype: str | None = None) -> Source:
    """Read the headers and configs of a checkpoint that becomes the variant ``name``.

    The formats are compressed-tensors, AWQ (GEMM), GPTQ, block FP8, AutoRound's exports in these, Quark's
    INT8, and 16 bit. ``dtype``, a key of CASTS, casts what is in 16 bit. Raises FlexQuantError, naming the
    file, for an unusable folder, another format, and settings that compressed-tensors cannot hold.
    """
    folder = find_model(folder)
    check_folder(folder)
    config = read_json(confined_file(folder, "config.json"))
    tensors = read_tensors(folder)
    section = quantization_section(folder, config)
    method = section.get("quant_method") if section else None
    if section is None:
        section = compressed_tensors_section((), "dense", ())
    elif is_auto_round_fp8(section):
        section, tensors = from_auto_round_fp8(folder, section, tensors)
    elif method in PACKED_METHODS:
        section, tensors = from_packed_format(folder, section, tensors)
    elif method == BLOCK_FP8:
        section, tensors = from_block_fp8(folder, section, tensors)
    elif method == QUARK:
        section, tensors = from_quark(folder, section, tensors)
    elif method == COMPRESSED_TENSORS:
        section, tensors = without_relics(section, tensors)
    else:
        raise FlexQuantError(
            f"{folder} has quant_method {method!r}; compressed-tensors, {', '.join(PACKED_METHODS)}, "
            f"{BLOCK_FP8} and {QUARK} are read: quantise the model again, e.g. by 'flexquant quantize'"
        )
    if stray := [name for name in tensors if name.endswith(PACKED_PARTS)]:
        raise FlexQuantError(
            f"{folder} has {stray[0]}, a part of an AWQ or GPTQ linear, without the weights or the settings "
            "of one; get the checkpoint again, or take the tensor out"
        )
    if dtype is not None:
        tensors, config = cast_tensors(tensors, dtype), with_dtype(config, dtype)
    return Source.make(name, folder, config, section, tensors)


def without_relics(
    section: JsonObject, tensors: Mapping[str, TensorRef]
) -> tuple[JsonObject, dict[str, TensorRef]]:
    """Return settings and tensors of compressed-tensors as its last releases write them.

    A dense ``sparsity_config`` says nothing, and is dropped. The KV cache's scales get their names of today.
    """
    if not is_sparse(section):
        section = {key: value for key, value in section.items() if key != "sparsity_config"}
    if not section.get("kv_cache_scheme"):
        return section, dict(tensors)
    return section, {CACHE_SCALE.sub(r".\1_\2", name): ref for name, ref in tensors.items()}
