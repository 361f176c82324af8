# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read a checkpoint's 16-bit tensors in another 16-bit dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.safetensors_io import DTYPES, TensorRef, computed, load_tensor
from flexquant.checkpoint.schemes import PACKED_SUFFIX, QUANTISATION_PARAMETER
from flexquant.errors import FlexQuantError

if TYPE_CHECKING:
    import torch

CASTS = {"bfloat16": "BF16", "float16": "F16"}
"""Name of a dtype in torch -> in safetensors."""
DTYPE_KEYS = ("dtype", "torch_dtype")


def cast_tensors(tensors: Mapping[str, TensorRef], dtype: str) -> dict[str, TensorRef]:
    """Return the tensors with those in 16 bit in ``dtype``, a key of CASTS; they are cast when they are read.

    Scales are cast where vLLM keeps them in the model's dtype: those of packed weights. What is in 32 bit
    stays: vLLM keeps some of it so, such as a router's correction bias, and casts the rest when it loads it.
    Raises FlexQuantError for another ``dtype`` and, when a tensor is read, for a number that ``dtype`` cannot
    hold.
    """
    if dtype not in CASTS:
        raise FlexQuantError(f"weights cannot be cast to the dtype {dtype!r}; take {' or '.join(CASTS)}")
    return {
        name: _cast(ref, CASTS[dtype]) if _follows_the_model(name, tensors) else ref
        for name, ref in tensors.items()
    }


def with_dtype(config: JsonObject, dtype: str) -> JsonObject:
    """Return a config, nested language model included, that states ``dtype`` wherever it states one."""
    keys = [key for key in DTYPE_KEYS if key in config] or DTYPE_KEYS[:1]
    nested = config.get("text_config")
    if isinstance(nested, dict) and any(key in nested for key in DTYPE_KEYS):
        config = config | {"text_config": with_dtype(nested, dtype)}
    return config | dict.fromkeys(keys, dtype)


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
