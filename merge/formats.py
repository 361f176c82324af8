# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Open a checkpoint of any supported format as a source of a merge, in the form of compressed-tensors.

Quantised values never change. Tensors that are stored in another form are converted whenever they are read,
so nothing is written before the merged checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from flexquant.checkpoint.cast import cast_tensors, with_dtype
from flexquant.checkpoint.folder import (
    check_folder,
    confined_file,
    quantization_section,
    read_json,
    read_tensors,
)
from flexquant.checkpoint.hub import find_model
from flexquant.checkpoint.loadable import COMPRESSED_TENSORS, is_sparse
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.safetensors_io import TensorRef
from flexquant.checkpoint.source import Source
from flexquant.errors import FlexQuantError
from flexquant.merge.block_fp8_format import (
    BLOCK_FP8,
    from_auto_round_fp8,
    from_block_fp8,
    is_auto_round_fp8,
)
from flexquant.merge.packed_formats import PACKED_PARTS, from_packed_format
from flexquant.merge.packed_settings import PACKED_METHODS
from flexquant.merge.quark_format import QUARK, from_quark

IN_16_BIT: JsonObject = {
    "quant_method": COMPRESSED_TENSORS,
    "format": "dense",
    "quantization_status": "compressed",
    "config_groups": {},
    "ignore": [],
}
"""The ``quantization_config`` of a variant that is not quantised."""


CACHE_SCALE = re.compile(r"\.([kv])_proj\.output_(scale|zero_point)$")
"""Matches the older names of the cache's scales."""


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
        section = IN_16_BIT
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
