# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Map a quantised checkpoint to the 16-bit model's parameter names and shapes, without the packing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from flexquant.checkpoint.safetensors_io import TensorRef, read_chunks
from flexquant.errors import FlexQuantError

PACKED_SUFFIX = "_packed"
WORD_BITS = 32
"""Bits of the int32 words that hold packed integers of at most 8 bits."""
# Parameters that compressed-tensors adds beside a module's own.
QUANTISATION_PARAMETER = re.compile(
    r"\.(weight|input|output|q|k|v|attn|prob)_(scale|zero_point|global_scale|g_idx|shape)$"
)


def logical_shapes(tensors: Mapping[str, TensorRef]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the unquantised model, by name.

    ``weight_packed`` counts as ``weight`` with the shape stored in ``weight_shape``. Raises FlexQuantError
    for a packed integer weight without that shape, or with one that does not fit it.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, ref in tensors.items():
        if name.endswith(PACKED_SUFFIX):
            name = name.removesuffix(PACKED_SUFFIX)
            shapes[name] = unpacked_shape(name, ref, tensors.get(f"{name}_shape"))
        elif not QUANTISATION_PARAMETER.search(name):
            shapes[name] = ref.shape
    return shapes


def unpacked_shape(name: str, packed: TensorRef, stored: TensorRef | None) -> tuple[int, ...]:
    """Return the shape of the parameter ``name``, which ``packed`` holds; ``stored`` holds the shape.

    Raises FlexQuantError if ``stored`` is missing, or does not fit the packed words.
    """
    if stored is None and packed.dtype == "U8" and packed.shape:  # FP4 formats: two values a byte
        return (*packed.shape[:-1], packed.shape[-1] * 2)
    if stored is None:
        raise FlexQuantError(
            f"{packed.file} holds '{packed.name}' without '{name}_shape'; quantise the model again"
        )
    shape = _read_integers(stored, len(packed.shape))
    fits = packed.shape and shape[:-1] == packed.shape[:-1]
    if not fits or not 1 <= shape[-1] <= packed.shape[-1] * WORD_BITS:
        raise FlexQuantError(
            f"{stored.file} holds '{stored.name}' {list(shape)}, which does not fit '{packed.name}' of shape "
            f"{list(packed.shape)}; quantise the model again"
        )
    return shape


def _read_integers(ref: TensorRef, count: int) -> tuple[int, ...]:
    codes: dict[str, Literal["q", "i"]] = {"I64": "q", "I32": "i"}
    if (code := codes.get(ref.dtype)) is None or ref.shape != (count,):
        raise FlexQuantError(
            f"{ref.file} holds '{ref.name}' as {ref.dtype} {list(ref.shape)}, expected I64 or I32 [{count}]"
        )
    return tuple(number for chunk in read_chunks(ref) for number in chunk.cast(code))
