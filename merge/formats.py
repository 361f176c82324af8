# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Open a checkpoint of any supported format as a source of a merge, in the form of compressed-tensors.

Quantised values never change. Tensors that are stored in another form are converted whenever they are read,
so nothing is written before the merged checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from flexquant.checkpoint.cast import cast_tensors, with_dtype
from flexquant.checkpoint.folder import check_folder, confined_file, read_json, read_tensors
from flexquant.checkpoint.hub import find_model
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.source import Source
from flexquant.errors import FlexQuantError
from flexquant.merge.block_fp8_format import BLOCK_FP8, from_block_fp8
from flexquant.merge.packed_formats import from_packed_format
from flexquant.merge.packed_settings import PACKED_METHODS

SETTINGS_FILES = ("quantize_config.json", "quant_config.json")
"""Files in which AutoGPTQ and AutoAWQ wrote what ``config.json`` lacks."""
SECTIONS = ("quantization_config", "compression_config")
"""Keys of ``config.json`` for the quantisation; the second is llm-compressor's before 2025."""
IN_16_BIT: JsonObject = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "quantization_status": "compressed",
    "config_groups": {},
    "ignore": [],
}
"""The ``quantization_config`` of a variant that is not quantised."""


def open_source(name: str, folder: str | Path, dtype: str | None = None) -> Source:
    """Read the headers and configs of a checkpoint that becomes the variant ``name``.

    The formats are compressed-tensors, AWQ (GEMM), GPTQ, AutoRound's exports in these, block FP8, and 16 bit.
    ``dtype``, a key of CASTS, casts what is in 16 bit. Raises FlexQuantError, naming the file, for an
    unusable folder, another format, and settings that compressed-tensors cannot hold.
    """
    folder = find_model(folder)
    check_folder(folder)
    config = read_json(confined_file(folder, "config.json"))
    tensors = read_tensors(folder)
    section = stored_section(folder, config)
    method = section.get("quant_method") if section else None
    if section is None:
        section = IN_16_BIT
    elif method in PACKED_METHODS:
        section, tensors = from_packed_format(folder, section, tensors)
    elif method == BLOCK_FP8:
        section, tensors = from_block_fp8(folder, section, tensors)
    elif method != "compressed-tensors":
        raise FlexQuantError(
            f"{folder} has quant_method {method!r}; compressed-tensors, {', '.join(PACKED_METHODS)} and "
            f"{BLOCK_FP8} are read: quantise the model again, e.g. by 'flexquant quantize'"
        )
    if dtype is not None:
        tensors, config = cast_tensors(tensors, dtype), with_dtype(config, dtype)
    return Source.make(name, folder, config, section, tensors)


def stored_section(folder: Path, config: JsonObject) -> JsonObject | None:
    """Return how a checkpoint says that it is quantised; None for one in 16 bit.

    Raises FlexQuantError, naming the file, for settings that are no JSON object.
    """
    for key in SECTIONS:
        found = config.get(key)
        if isinstance(found, dict):
            return found
        if found is not None:
            raise FlexQuantError(
                f"{folder / 'config.json'} has {key} {found!r}, expected an object; get the checkpoint again"
            )
    for file in SETTINGS_FILES:
        if (folder / file).exists():
            section = read_json(confined_file(folder, file))
            return {"quant_method": "awq" if "zero_point" in section else "gptq"} | section
    return None
