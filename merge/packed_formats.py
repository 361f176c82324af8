# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read AWQ and GPTQ checkpoints, and AutoRound's exports in these formats, as compressed-tensors stores them.

A linear [out, in] with ``bits`` a weight and groups of ``g`` inputs has in these formats, as int32 words of
unsigned integers,

- GPTQ: ``qweight`` [in * bits / 32, out], a word holds neighbouring inputs of one output, and ``g_idx`` [in],
  the group of each input; without it the inputs are in order. compressed-tensors has the words of its
  transpose;
- AWQ (GEMM): ``qweight`` [in, out / 8], a word holds neighbouring outputs of one input, in another order;
- both: ``scales`` [in / g, out], and ``qzeros`` [in / g, out * bits / 32], the zero points. GPTQ's older form
  stores them minus one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from flexquant.checkpoint.loadable import COMPRESSED_TENSORS
from flexquant.checkpoint.model_config import ConfigGroup, JsonObject, QuantizedNumbers
from flexquant.checkpoint.module_names import EMBEDDINGS
from flexquant.checkpoint.safetensors_io import TensorRef, computed, load_tensor
from flexquant.errors import FlexQuantError
from flexquant.merge.packed_settings import GPTQ, PackedFormat, read_settings

EMBEDDING_WEIGHTS = tuple(f"{name}.weight" for name in EMBEDDINGS)
FLOATS = ("F16", "BF16", "F32")
PACKED_PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")
"""Ends of the names of a linear's tensors."""
Tensors = dict[str, TensorRef]
Form = TypeVar("Form")
"""What the settings of a format say of a linear."""


def from_packed_format(
    folder: Path, section: JsonObject, tensors: Mapping[str, TensorRef]
) -> tuple[JsonObject, Tensors]:
    """Return the ``quantization_config`` and the tensors as compressed-tensors has them.

    Quantised values do not change. Raises FlexQuantError for settings that compressed-tensors cannot hold,
    and for tensors whose dtype, shape or content does not fit the settings.
    """
    settings = read_settings(folder, section)
    method = settings.base.method
    linears = [key.removesuffix(".qweight") for key in tensors if key.endswith(".qweight")]
    if not linears:
        raise FlexQuantError(
            f"{folder} has no linear in the format of {method} (no tensor is named '*.qweight'); take a "
            "checkpoint that is not packed for one kernel, such as marlin's"
        )
    found = {name: ref for name, ref in tensors.items() if not _is_part(name, tensors)}
    forms = {name: settings.of(name) for name in linears}
    for name, form in forms.items():
        for part in ("weight", "weight_packed"):
            if f"{name}.{part}" in tensors:
                raise FlexQuantError(
                    f"{folder} has {name}.{part} beside {name}.qweight; a linear is stored once: get the "
                    "checkpoint again"
                )
        found |= _linear(name, form, tensors)
    return section_by_layer(forms, _scheme, "pack-quantized", matrices_in_16_bit(tensors)), found


def matrices_in_16_bit(tensors: Mapping[str, TensorRef]) -> set[str]:
    """Return the modules with a matrix called ``weight``, but for embeddings; lm_head is always among them.

    The settings of a checkpoint name what is not quantised by parts of names, which may fit others.
    """
    weights = [key for key, ref in tensors.items() if key.endswith(".weight") and len(ref.shape) == 2]
    return {
        "lm_head",
        *(key.removesuffix(".weight") for key in weights if not key.endswith(EMBEDDING_WEIGHTS)),
    }


def _is_part(name: str, tensors: Mapping[str, TensorRef]) -> bool:
    """Whether a tensor is one that `_linear` converts."""
    module = name.rpartition(".")[0]
    return name.endswith(PACKED_PARTS) and f"{module}.qweight" in tensors


def _linear(module: str, form: PackedFormat, tensors: Mapping[str, TensorRef]) -> Tensors:
    """Return a linear's tensors; raise FlexQuantError unless what is stored fits the settings."""
    part = {name: tensors.get(f"{module}.{name}") for name in ("qweight", "scales", "qzeros", "g_idx")}
    qweight = part["qweight"]
    assert qweight is not None
    rows, columns = (*qweight.shape, 1, 1)[:2]
    values = 32 // form.bits
    inputs, outputs = (rows * values, columns) if form.method == GPTQ else (rows, columns * values)
    groups = -(-inputs // form.group_size) if form.group_size > 0 else 1
    expected: dict[str, tuple[Sequence[str], tuple[int, ...]]] = {
        "qweight": (("I32",), (rows, columns)),
        "scales": (FLOATS, (groups, outputs)),
        "qzeros": (("I32",), (groups, outputs // values)),
        "g_idx": (("I32", "I64"), (inputs,)),
    }
    needed = {"scales"} if form.symmetric else {"scales", "qzeros"}
    for name, (dtypes, shape) in expected.items():
        if part[name] is not None or name in needed:
            _check_tensor(f"{module}.{name}", part[name], dtypes, shape)
    scales, qzeros, g_idx = part["scales"], part["qzeros"], part["g_idx"]
    assert scales is not None
    _check_order(module, form, g_idx, inputs)
    if form.symmetric and qzeros is not None and not form.is_symmetric(load_tensor(qzeros)):
        raise FlexQuantError(
            f"{module} has zero points beside {form.middle}, though its quantization_config says 'sym'; get "
            "the checkpoint again"
        )
    words = -(-inputs // values)
    weight = f"{module}.weight"
    found = [
        _transformed(f"{weight}_packed", qweight, "I32", (outputs, words), form.pack_weight),
        _transformed(f"{weight}_scale", scales, scales.dtype, (outputs, groups), _turned),
        _constant(f"{weight}_shape", qweight, torch.tensor([outputs, inputs])),
    ]
    if not form.symmetric and qzeros is not None:
        shape = (-(-outputs // values), groups)
        found.append(_transformed(f"{weight}_zero_point", qzeros, "I32", shape, form.pack_zero_points))
    return {ref.name: ref for ref in found}


def _turned(scales: torch.Tensor) -> torch.Tensor:
    return scales.T.contiguous()


def _check_order(module: str, form: PackedFormat, g_idx: TensorRef | None, inputs: int) -> None:
    """Raise FlexQuantError unless each group holds neighbouring inputs."""
    in_order = torch.arange(inputs) // (form.group_size if form.group_size > 0 else inputs)
    if form.reordered if g_idx is None else not torch.equal(load_tensor(g_idx).long(), in_order):
        raise FlexQuantError(
            f"{module} was quantised with its inputs in another order (desc_act), which the kernels for "
            "compressed-tensors do not undo; take a checkpoint without desc_act"
        )


def _check_tensor(key: str, ref: TensorRef | None, dtypes: Sequence[str], shape: tuple[int, ...]) -> None:
    if ref is None:
        raise FlexQuantError(f"{key} is missing; get the checkpoint again")
    if ref.dtype not in dtypes or ref.shape != shape:
        raise FlexQuantError(
            f"{key} is {ref.dtype} {list(ref.shape)} instead of {' or '.join(dtypes)} {list(shape)}; correct "
            "bits and group_size in the quantization_config, or get the checkpoint again"
        )


class _Last(threading.local):
    """The tensor that a thread converted last: it is read a few rows at a time."""

    key: object = None
    tensor = torch.empty(0)


_last = _Last()


def _transformed(
    name: str,
    stored: TensorRef,
    dtype: str,
    shape: tuple[int, ...],
    convert: Callable[[torch.Tensor], torch.Tensor],
) -> TensorRef:
    key = object()

    def compute(rows: Sequence[range] | None) -> torch.Tensor:
        if _last.key is not key:
            _last.key, _last.tensor = key, convert(load_tensor(stored))
        return _of_rows(_last.tensor, rows)

    return computed(name, stored, dtype, shape, compute)


def _constant(name: str, like: TensorRef, value: torch.Tensor) -> TensorRef:
    return computed(name, like, "I64", tuple(value.shape), lambda rows: _of_rows(value, rows))


def _of_rows(whole: torch.Tensor, rows: Sequence[range] | None) -> torch.Tensor:
    return whole if rows is None else torch.cat([whole[part.start : part.stop] for part in rows])


def section_by_layer(
    forms: Mapping[str, Form], scheme: Callable[[Form], ConfigGroup], file_format: str, ignored: set[str]
) -> JsonObject:
    """Return the ``quantization_config``: a group for each form, which names its linears if several."""
    linears: dict[Form, list[str]] = {}
    for name in sorted(forms):
        linears.setdefault(forms[name], []).append(name)
    groups = [
        ConfigGroup(targets=names if len(linears) > 1 else ["Linear"], **scheme(form), format=file_format)
        for form, names in linears.items()
    ]
    return compressed_tensors_section(groups, file_format, ignored)


def compressed_tensors_section(
    groups: Sequence[ConfigGroup], file_format: str, ignored: Iterable[str]
) -> JsonObject:
    """Return the ``quantization_config`` of a checkpoint of compressed-tensors."""
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": file_format,
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": sorted(ignored),
    }


def _scheme(form: PackedFormat) -> ConfigGroup:
    weights: QuantizedNumbers = {
        "num_bits": form.bits,
        "type": "int",
        "symmetric": form.symmetric,
        "strategy": "group" if form.group_size > 0 else "channel",
        "group_size": form.group_size if form.group_size > 0 else None,
        "dynamic": False,
    }
    return {"weights": weights, "input_activations": None}
