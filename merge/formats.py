# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Open a checkpoint of any supported format as a source of a merge, in the form of compressed-tensors.

Quantised values never change. Tensors that are stored in another form are converted whenever they are read,
so nothing is written before the merged checkpoint. A reader of a format (`packed_formats`,
`eight_bit_formats`) returns the scheme of each quantised linear, and the tensors by their new names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from flexquant.checkpoint.folder import find_model, read_config, read_tensors
from flexquant.checkpoint.loadable import COMPRESSED_TENSORS, is_sparse
from flexquant.checkpoint.model_config import ConfigGroup, JsonObject
from flexquant.checkpoint.module_names import EMBEDDINGS
from flexquant.checkpoint.safetensors_io import TensorRef
from flexquant.checkpoint.source import Source, cast_tensors, with_dtype
from flexquant.errors import FlexQuantError
from flexquant.merge.eight_bit_formats import BLOCK_FP8, QUARK, from_fp8, from_quark, is_fp8
from flexquant.merge.packed_formats import PACKED_METHODS, PACKED_PARTS, from_packed_format

EMBEDDING_WEIGHTS = tuple(f"{name}.weight" for name in EMBEDDINGS)
CACHE_SCALE = re.compile(r"\.([kv])_proj\.output_(scale|zero_point)$")
"""Matches the older names of the cache's scales."""


def open_source(name: str, folder: str | Path, dtype: str | None = None) -> Source:
    """Read the headers and configs of a checkpoint that becomes the variant ``name``.

    The formats are compressed-tensors, AWQ (GEMM), GPTQ, block FP8, AutoRound's exports in these, Quark's
    INT8, and 16 bit. ``dtype``, a key of CASTS, casts what is in 16 bit. Raises FlexQuantError, naming the
    file, for an unusable folder, another format, and settings that compressed-tensors cannot hold.
    """
    folder = find_model(folder)
    config, stored = read_config(folder)
    section, tensors = _read(folder, stored, read_tensors(folder))
    if stray := [name for name in tensors if name.endswith(PACKED_PARTS)]:
        raise FlexQuantError(
            f"{folder} has {stray[0]}, a part of an AWQ or GPTQ linear, without the weights or the settings "
            "of one; get the checkpoint again, or take the tensor out"
        )
    if dtype is not None:
        tensors, config = cast_tensors(tensors, dtype), with_dtype(config, dtype)
    return Source.make(name, folder, config, section, tensors)


def _read(
    folder: Path, section: JsonObject | None, tensors: dict[str, TensorRef]
) -> tuple[JsonObject, dict[str, TensorRef]]:
    """Return the ``quantization_config`` and the tensors as compressed-tensors has them."""
    if section is None:
        return _section({}, ()), tensors
    method = section.get("quant_method")
    if method == COMPRESSED_TENSORS:
        return _without_relics(section, tensors)
    if is_fp8(section):
        schemes, found = from_fp8(folder, section, tensors)
    elif method in PACKED_METHODS:
        schemes, found = from_packed_format(folder, section, tensors)
    elif method == QUARK:
        schemes, found = from_quark(folder, section, tensors)
    else:
        raise FlexQuantError(
            f"{folder} has quant_method {method!r}; compressed-tensors, {', '.join(PACKED_METHODS)}, "
            f"{BLOCK_FP8} and {QUARK} are read: quantise the model again, e.g. by 'flexquant quantize'"
        )
    # The settings name what is not quantised by parts of names, which may fit others.
    matrices = {key for key, ref in tensors.items() if key.endswith(".weight") and len(ref.shape) == 2}
    kept = {key.removesuffix(".weight") for key in matrices if not key.endswith(EMBEDDING_WEIGHTS)}
    return _section(schemes, sorted({"lm_head", *kept} - schemes.keys())), found


def _section(schemes: Mapping[str, ConfigGroup], ignored: Sequence[str]) -> JsonObject:
    """Return a ``quantization_config``: a group for each scheme, which names its linears if several."""
    linears: dict[str, list[str]] = {}
    for name in sorted(schemes):
        linears.setdefault(json.dumps(schemes[name]), []).append(name)
    groups = [
        ConfigGroup(targets=names if len(linears) > 1 else ["Linear"], **schemes[names[0]])
        for names in linears.values()
    ]
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": groups[0]["format"] if groups else "dense",
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": list(ignored),
    }


def _without_relics(
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
