# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read a checkpoint's 16-bit tensors in another 16-bit dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flexquant.checkpoint.safetensors_io import DTYPES, TensorRef, computed, load_tensor
from flexquant.checkpoint.schemes import PACKED_SUFFIX, QUANTISATION_PARAMETER
from flexquant.errors import FlexQuantError

if TYPE_CHECKING:
    import torch

CASTS = {"bfloat16": "BF16", "float16": "F16"}
"""Name of a dtype in torch -> in safetensors."""


def cast_tensors(tensors: Mapping[str, TensorRef], dtype: str) -> dict[str, TensorRef]:
    """Return the tensors with those in 16 bit in ``dtype``, a key of CASTS; they are cast when they are read.

    Scales are cast where vLLM keeps them in the model's dtype: those of packed weights. Reading raises
    FlexQuantError for a number that ``dtype`` cannot hold.
    """
    return {
        name: _cast(ref, CASTS[dtype]) if _follows_the_model(name, tensors) else ref
        for name, ref in tensors.items()
    }


def _follows_the_model(name: str, tensors: Mapping[str, TensorRef]) -> bool:
    if tensors[name].dtype not in CASTS.values():
        return False
    is_packed = f"{name.rpartition('.')[0]}.weight{PACKED_SUFFIX}" in tensors
    return is_packed or not QUANTISATION_PARAMETER.search(name)


def _cast(ref: TensorRef, dtype: str) -> TensorRef:
    if ref.dtype == dtype:
        return ref

    def compute(rows: Sequence[range] | None) -> torch.Tensor:
        import torch

        name = str(DTYPES[dtype][1])
        read = load_tensor(ref, rows)
        cast: torch.Tensor = read.to(getattr(torch, name))
        if not bool((cast.isfinite() == read.isfinite()).all()):
            raise FlexQuantError(
                f"tensor '{ref.name}' in {ref.file} holds numbers that {name} cannot hold; cast the other "
                "variants instead"
            )
        return cast

    return computed(ref.name, ref, dtype, ref.shape, compute)
