# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A quantised checkpoint as the 16-bit model sees it: parameter names and shapes without the packing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from flexquant.checkpoint.safetensors_io import TensorRef, read_chunks
from flexquant.errors import FlexQuantError

PACKED_SUFFIX = "_packed"
# Parameters that compressed-tensors adds beside a module's own.
QUANTISATION_PARAMETER = re.compile(
    r"\.(weight|input|output|q|k|v|attn|prob)_(scale|zero_point|global_scale|g_idx|shape)$"
)


def logical_shapes(tensors: Mapping[str, TensorRef]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the unquantised model, by its name there.

    ``weight_packed`` counts as ``weight`` with the shape stored in ``weight_shape``. Raises FlexQuantError
    for a packed integer weight without that shape.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, ref in tensors.items():
        if name.endswith(PACKED_SUFFIX):
            name = name.removesuffix(PACKED_SUFFIX)
            shapes[name] = _unpacked_shape(name, ref, tensors)
        elif not QUANTISATION_PARAMETER.search(name):
            shapes[name] = ref.shape
    return shapes


def _read_integers(ref: TensorRef) -> tuple[int, ...]:
    codes: dict[str, Literal["q", "i"]] = {"I64": "q", "I32": "i"}
    if (code := codes.get(ref.dtype)) is None:
        raise FlexQuantError(f"{ref.file} holds '{ref.name}' as {ref.dtype}, expected I64 or I32")
    return tuple(number for chunk in read_chunks(ref) for number in chunk.cast(code))


def _unpacked_shape(name: str, packed: TensorRef, tensors: Mapping[str, TensorRef]) -> tuple[int, ...]:
    stored = tensors.get(name + "_shape")
    if stored is not None:
        return _read_integers(stored)
    if packed.dtype == "U8":  # FP4 formats: two values a byte, no stored shape
        return (*packed.shape[:-1], packed.shape[-1] * 2)
    raise FlexQuantError(
        f"{packed.file} holds '{packed.name}' without '{name}_shape'; quantise the model again"
    )
