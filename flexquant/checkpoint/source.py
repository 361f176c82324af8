# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Open and validate an input of a merge, before anything is written, and cast what it has in 16 bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flexquant.checkpoint.built_model import check_heads, find_model_class
from flexquant.checkpoint.merged_config import check_variant_name
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.module_names import LAYER
from flexquant.checkpoint.safetensors_io import DTYPES, ComputedTensor, TensorRef, load_tensor, read_chunks
from flexquant.checkpoint.schemes import PACKED_SUFFIX, QUANTISATION_PARAMETER
from flexquant.errors import FlexQuantError

if TYPE_CHECKING:
    import torch

FREQUENCIES = (
    "rotary_emb.inv_freq",
    "rotary_pos_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
)
CASTS = {"bfloat16": "BF16", "float16": "F16"}
"""Name of a dtype in torch -> in safetensors."""
DTYPE_KEYS = ("dtype", "torch_dtype")


@dataclass(frozen=True)
class Source:
    """A checkpoint that becomes the variant ``name`` of the merged one."""

    name: str
    folder: Path
    config: JsonObject
    """The whole ``config.json``."""
    quantization_config: JsonObject
    tensors: dict[str, TensorRef]
    """Original key -> reference into the checkpoint's own shards."""

    @property
    def owner(self) -> str:
        """What messages call it."""
        return f"variant '{self.name}'"

    @property
    def architecture(self) -> str:
        return self.config["architectures"][0]

    @classmethod
    def make(
        cls, name: str, folder: Path, config: JsonObject, section: JsonObject, tensors: dict[str, TensorRef]
    ) -> Source:
        """Return a source whose tensors are in the form of compressed-tensors, without those that vLLM skips.

        ``section`` is its ``quantization_config``. Raises FlexQuantError for a config that is not a model's.
        """
        check_variant_name(name)
        place = str(folder / "config.json")
        architectures = config.get("architectures")
        if not isinstance(architectures, list) or not isinstance((architectures or [None])[0], str):
            raise FlexQuantError(f"{place} names no architectures; a causal language model is needed")
        check_heads(config, place)
        return cls(name, folder, config, section, _read_when_served(tensors, config, place))


def _read_when_served(tensors: dict[str, TensorRef], config: JsonObject, place: str) -> dict[str, TensorRef]:
    """Leave out what vLLM skips: RoPE's frequencies, and zero biases where the model has no bias."""
    kept = {name: ref for name, ref in tensors.items() if not name.endswith(FREQUENCIES)}
    biases = [name for name in kept if name.endswith(".bias") and LAYER.search(name)]
    if not biases or (model := find_model_class(config, place)) is None:
        return kept
    for name in biases:
        own = model.name_of(name)
        of_model = own in model.shapes or f"{own.removesuffix('bias')}weight" not in model.shapes
        if not of_model and not any(bytes(chunk).strip(b"\0") for chunk in read_chunks(kept[name])):
            del kept[name]
    return kept


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

    return ComputedTensor(ref.name, dtype, ref.shape, ref.file, 0, compute)
