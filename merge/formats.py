# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Open a checkpoint of any supported format as a source of a merge, in the form of compressed-tensors.

Quantised values never change. Tensors in another form are converted whenever they are read. A reader of a
format (`packed_formats`, `eight_bit_formats`) returns the scheme of each quantised linear, and the tensors by
their new names.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from flexquant.checkpoint.built_model import check_heads, find_model_class
from flexquant.checkpoint.draft_heads import with_heads_ignored
from flexquant.checkpoint.folder import find_model, read_config, read_tensors
from flexquant.checkpoint.loadable import COMPRESSED_TENSORS, is_sparse
from flexquant.checkpoint.merged_config import check_variant_name
from flexquant.checkpoint.model_config import SECTIONS, ConfigGroup, JsonObject
from flexquant.checkpoint.module_names import EMBEDDINGS, HEAD, LAYER
from flexquant.checkpoint.safetensors_io import CASTS, ComputedTensor, TensorRef, Tensors, load_tensor
from flexquant.checkpoint.schemes import LINEAR, PACKED_SUFFIX, QUANTISATION_PARAMETER
from flexquant.errors import FlexQuantError
from flexquant.merge.eight_bit_formats import BLOCK_FP8, QUARK, from_fp8, from_quark, is_fp8
from flexquant.merge.packed_formats import PACKED_METHODS, PACKED_PARTS, from_packed_format

FREQUENCIES = re.compile(r"rotary_(pos_)?emb\.inv_freq$|rotary_emb\.(cos|sin)_cached$")
DTYPE_KEYS = ("dtype", "torch_dtype")
EMBEDDING_WEIGHTS = tuple(f"{name}.weight" for name in EMBEDDINGS)
Settled = tuple[JsonObject, dict[str, TensorRef]]
"""A ``quantization_config`` and the tensors as compressed-tensors has them."""
CACHE_SCALE = re.compile(r"\.([kv])_proj\.output_(scale|zero_point)$")
"""Matches the older names of the cache's scales."""


@dataclass(frozen=True)
class Source:
    """A checkpoint that becomes the variant ``name`` of the merged one."""

    name: str
    folder: Path
    config: JsonObject
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


def open_source(name: str, folder: str | Path, dtype: str | None = None) -> Source:
    """Read a variant's headers and configs; cast 16 bit to ``dtype``, of CASTS. Raises FlexQuantError."""
    check_variant_name(name)
    if hasattr(torch.nn.ModuleDict(), name):
        raise FlexQuantError(f"a server cannot load a variant named '{name}', a word of PyTorch's; rename it")
    folder = find_model(folder)
    config = read_config(folder)
    section, tensors = _read(folder, config.get(SECTIONS[0]), read_tensors(folder))
    if stray := [name for name in tensors if name.endswith(PACKED_PARTS)]:
        problem = f"{folder} has {stray[0]}, a part of an AWQ or GPTQ linear, without its weights or settings"
        raise FlexQuantError(f"{problem}; get the checkpoint again, or take the tensor out")
    if dtype is not None:
        tensors, config = cast_tensors(tensors, dtype), with_dtype(config, dtype)
    place = str(folder / "config.json")
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not isinstance((architectures or [None])[0], str):
        raise FlexQuantError(f"{place} names no architectures; a causal language model is needed")
    check_heads(config, place)
    section = with_heads_ignored(section, config, tensors)
    return Source(name, folder, config, section, _read_when_served(tensors, config, place))


def _read(folder: Path, section: JsonObject | None, tensors: dict[str, TensorRef]) -> Settled:
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
        read = f"compressed-tensors, {', '.join(PACKED_METHODS)}, {BLOCK_FP8} and {QUARK} are read"
        advice = "quantise the model again, e.g. by 'flexquant quantize'"
        raise FlexQuantError(f"{folder} has quant_method {method!r}; {read}: {advice}")
    # The settings name what is not quantised by parts of names, which may fit others.
    matrices = {key for key, ref in tensors.items() if key.endswith(".weight") and len(ref.shape) == 2}
    kept = {key.removesuffix(".weight") for key in matrices if not key.endswith(EMBEDDING_WEIGHTS)}
    return _section(schemes, sorted({"lm_head", *kept} - schemes.keys())), found


def _section(schemes: Mapping[str, ConfigGroup], ignored: Sequence[str]) -> JsonObject:
    """Return a ``quantization_config``: a group for each scheme, which names its linears if several."""
    linears: dict[str, list[str]] = {}
    for name in sorted(schemes):
        linears.setdefault(json.dumps(schemes[name]), []).append(name)
    # vLLM's lm_head is of another class than its linears.
    every = [LINEAR, *filter(HEAD.search, sorted(schemes))] if len(linears) == 1 else None
    groups = [ConfigGroup(targets=every or names, **schemes[names[0]]) for names in linears.values()]
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": groups[0]["format"] if groups else "dense",
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": list(ignored),
    }


def _without_relics(section: JsonObject, tensors: Tensors) -> Settled:
    """Return settings and tensors with today's names of cache scales, without a dense ``sparsity_config``."""
    if not is_sparse(section):
        section = {key: value for key, value in section.items() if key != "sparsity_config"}
    if not section.get("kv_cache_scheme"):
        return section, dict(tensors)
    return section, {CACHE_SCALE.sub(r".\1_\2", name): ref for name, ref in tensors.items()}


def _read_when_served(tensors: dict[str, TensorRef], config: JsonObject, place: str) -> dict[str, TensorRef]:
    """Leave out what vLLM skips: RoPE's frequencies, and zero biases where the model has no bias."""
    kept = {name: ref for name, ref in tensors.items() if not FREQUENCIES.search(name)}
    biases = [name for name in kept if name.endswith(".bias") and LAYER.search(name)]
    if not biases or (model := find_model_class(config, place)) is None:
        return kept
    for name in biases:
        own = model.name_of(name)
        of_model = own in model.shapes or f"{own.removesuffix('bias')}weight" not in model.shapes
        if not of_model and not bool(load_tensor(kept[name]).any()):
            del kept[name]
    return kept


def cast_tensors(tensors: Tensors, dtype: str) -> dict[str, TensorRef]:
    """Return the tensors with those in 16 bit in ``dtype``, a key of CASTS; they are cast when they are read.

    Scales are cast where vLLM keeps them in the model's dtype: those of packed weights, in 32 bit too. What
    else is in 32 bit stays, as vLLM keeps some of it so. Raises FlexQuantError for another ``dtype`` and,
    when a tensor is read, for a number that ``dtype`` cannot hold.
    """
    if dtype not in CASTS:
        raise FlexQuantError(f"weights cannot be cast to the dtype {dtype!r}; take {' or '.join(CASTS)}")
    found = dict(tensors)
    for name, ref in tensors.items():
        is_scale = QUANTISATION_PARAMETER.search(name) is not None
        if is_scale and f"{name.rpartition('.')[0]}.weight{PACKED_SUFFIX}" not in tensors:
            continue
        if ref.dtype in (*CASTS.values(), *(["F32"] if is_scale else [])) and ref.dtype != CASTS[dtype]:
            found[name] = _cast(ref, dtype)
    return found


def stated_dtype(config: JsonObject) -> str | None:
    """Return the dtype that a config, or its nested language model's, states; None if it states none."""
    nested = config.get("text_config")
    stated = (of.get(key) for of in (config, nested) if isinstance(of, dict) for key in DTYPE_KEYS)
    return next((dtype for dtype in stated if isinstance(dtype, str)), None)


def with_dtype(config: JsonObject, dtype: str) -> JsonObject:
    """Return a config, nested language model included, that states ``dtype`` wherever it states one."""
    keys = [key for key in DTYPE_KEYS if key in config] or DTYPE_KEYS[:1]
    nested = config.get("text_config")
    if isinstance(nested, dict) and any(key in nested for key in DTYPE_KEYS):
        config = config | {"text_config": with_dtype(nested, dtype)}
    return config | dict.fromkeys(keys, dtype)


def _cast(ref: TensorRef, dtype: str) -> TensorRef:
    def compute(rows: Sequence[range] | None) -> torch.Tensor:
        read = load_tensor(ref, rows)
        cast: torch.Tensor = read.to(getattr(torch, dtype))
        if not bool((cast.isfinite() == read.isfinite()).all()):
            problem = f"tensor '{ref.name}' in {ref.file} holds numbers that {dtype} cannot hold"
            raise FlexQuantError(f"{problem}; cast the other variants instead")
        return cast

    return ComputedTensor(ref.name, CASTS[dtype], ref.shape, ref.file, 0, compute, stored_dtype=ref.dtype)
