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

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.entrypoints.convert import AutoAWQConverter
from torch import Tensor
from torch.nn.functional import pad

from flexquant.checkpoint.model_config import (
    AWQ,
    GPTQ,
    ConfigGroup,
    JsonObject,
    complete_settings,
    integer_weights,
    wrong_setting,
)
from flexquant.checkpoint.patterns import LEFT_OUT, expressions_of_dynamic, fitting
from flexquant.checkpoint.safetensors_io import ComputedTensor, TensorRef, Tensors, load_tensor
from flexquant.errors import FlexQuantError

FLOATS = ("F16", "BF16", "F32")
PACKED_PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")
"""Ends of the names of a linear's tensors."""
AUTO_ROUND = ("auto-round", "intel/auto-round")
PACKED_METHODS = (AWQ, GPTQ, *AUTO_ROUND)
WITH_OFFSET, WITHOUT_OFFSET = "gptq", "gptq_v2"
"""Values of GPTQ's ``checkpoint_format``: zero points stored minus one, and as they are."""

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Each of eight neighbouring outputs -> its place in a word of AWQ's."""
INPUTS_AT_A_TIME = 256
"""Inputs of an AWQ linear that are repacked at a time, to stay in a core's cache; an even number."""
BY_LAYER = ("bits", "group_size", "sym", "desc_act")
"""Settings that vLLM reads of a pattern of GPTQModel's ``dynamic``."""
Read = tuple[dict[str, ConfigGroup], dict[str, TensorRef]]
"""The scheme of each quantised linear, and the tensors as compressed-tensors has them."""


@dataclass(frozen=True)
class PackedFormat:
    """What the settings of a checkpoint say of a quantised linear."""

    method: str
    """AWQ or GPTQ."""
    bits: int
    group_size: int
    """Inputs of a group; -1 for all."""
    symmetric: bool
    offsets: tuple[int, ...] = (0,)
    """What may have to be added to a stored zero point."""
    reordered: bool = field(default=False, compare=False)
    """Whether the inputs without ``g_idx`` are in an unknown order."""

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    def values(self, packed: Tensor) -> Tensor:
        """Return the unsigned values in int32 words [rows, words], int32 [rows, values]."""
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32)
        values = (packed.unsqueeze(-1) >> shifts & (1 << self.bits) - 1).flatten(-2)
        if self.method == AWQ:
            values, _ = AutoAWQConverter.reverse_awq_order(values, None, self.bits)
        return values

    def pack_weight(self, stored: Tensor) -> Tensor:
        """Return ``weight_packed``, int32 [out, in * bits / 32]."""
        if self.method == GPTQ:
            return stored.T.contiguous()
        inputs, words = stored.shape
        pairs = torch.zeros(words, len(AWQ_PLACES), -(-inputs // 8) * 4, dtype=torch.uint8)
        for first in range(0, inputs, INPUTS_AT_A_TIME):
            part = stored[first : first + INPUTS_AT_A_TIME].view(torch.uint8).unflatten(1, (words, 4))
            part = pad(part.permute(2, 1, 0), (0, part.shape[0] % 2))  # a byte: two outputs of one input
            even, odd = part[..., 0::2], part[..., 1::2]
            halves = even & 15 | odd << 4, even >> 4 | odd & 240
            start, stop = first // 2, first // 2 + even.shape[-1]
            for output, place in enumerate(AWQ_PLACES):
                pairs[:, output, start:stop] = halves[place % 2][place // 2]
        return pairs.flatten(0, 1).view(torch.int32)

    def pack_zero_points(self, stored: Tensor) -> Tensor:
        """Return ``weight_zero_point``, int32 [out * bits / 32, in / g]."""
        zero_points = (self.values(stored) + self.offsets[0]) % (1 << self.bits)
        signed = (zero_points - self.middle).to(torch.int8)
        return pack_to_int32(signed.T.contiguous(), self.bits, packed_dim=0).contiguous()

    def is_symmetric(self, stored: Tensor) -> bool:
        """Whether all zero points are in the middle."""
        values, end = self.values(stored), 1 << self.bits
        return any(bool(((values + offset) % end == self.middle).all()) for offset in self.offsets)

    def scheme(self) -> ConfigGroup:
        """Return what a group of compressed-tensors says of such linears."""
        weights = integer_weights(self.bits, self.symmetric, self.group_size)
        weights["dynamic"] = False
        return {"weights": weights, "input_activations": None, "format": "pack-quantized"}


def read_settings(folder: Path, section: JsonObject) -> PackedFormat:
    """Return what settings say of all linears; raise FlexQuantError for what cannot be held."""
    return {AWQ: _read_awq, GPTQ: _read_gptq}.get(section["quant_method"], _read_auto_round)(folder, section)


def _read_dynamic(folder: Path, section: JsonObject, names: Sequence[str]) -> dict[str, PackedFormat]:
    """Return the formats of those of the linears ``names`` that GPTQModel's ``dynamic`` has a pattern for."""
    dynamic = section.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise wrong_setting(folder, "dynamic", dynamic, "an object of settings by pattern")
    found: dict[str, PackedFormat] = {}
    fits = fitting(expressions_of_dynamic(section), names, str(folder), " in 'dynamic'")
    for text, changes in dynamic.items():
        left_out = text.startswith(LEFT_OUT)
        if not left_out and not isinstance(changes, dict):
            raise wrong_setting(folder, f"'{text}' in 'dynamic' with", changes, "an object of settings")
        own = {} if left_out else {key: changes[key] for key in BY_LAYER if key in changes}
        found = dict.fromkeys(fits[text], _read_gptq(folder, section | own)) | found
    return found


def _read_auto_round(folder: Path, section: JsonObject) -> PackedFormat:
    packing = str(section.get("packing_format"))
    method = next((known for known in (AWQ, GPTQ) if known in packing), None)
    extra = section.get("extra_config") or {}
    layers = list(extra.values()) if isinstance(extra, dict) else [extra]
    if not all(isinstance(layer, dict) and type(layer.get("bits", 16)) is int for layer in layers):
        expected = "an object of settings by layer, with numbers of bits"
        raise wrong_setting(folder, "extra_config", extra, expected)
    found = complete_settings(section, folder)
    symmetric, kind = found["sym"], section.get("data_type", "int")
    is_served = kind == "int" and (method == AWQ or (method == GPTQ and symmetric))
    if method is None or not is_served or any(layer.get("bits", 16) < 16 for layer in layers):
        form = f"packing_format {packing}, data_type {section.get('data_type')}, sym {symmetric}"
        problem = f"in a form that is not read ({form}, {len(layers)} layers with settings of their own)"
        forms = "auto_round:auto_gptq (symmetric), auto_round:auto_awq or llm_compressor"
        advice = f"export it as {forms}, as integers, with one setting for all layers"
        raise FlexQuantError(f"{folder} was exported by AutoRound {problem}; {advice}")
    # AutoRound's releases differ in the offset; vLLM ignores the zero points of its symmetric linears.
    return PackedFormat(method, *_bits_and_size(folder, found, method), symmetric, offsets=(0, 1))


def _read_awq(folder: Path, section: JsonObject) -> PackedFormat:
    version = str(section.get("version", "gemm"))
    if version.lower() != "gemm":
        raise FlexQuantError(f"{folder} is in AWQ's format {version!r}; take one in the GEMM format")
    found = complete_settings(section, folder, AWQ)
    return PackedFormat(AWQ, *_bits_and_size(folder, found, AWQ), not found["zero_point"])


def _read_gptq(folder: Path, section: JsonObject) -> PackedFormat:
    form = section.get("checkpoint_format") or WITH_OFFSET
    if form not in (WITH_OFFSET, WITHOUT_OFFSET):
        read = f"only '{WITH_OFFSET}' and '{WITHOUT_OFFSET}' are read: take the one that it was packed from"
        raise FlexQuantError(f"{folder} has the checkpoint_format {form!r}; {read}")
    offset = 1 if form == WITH_OFFSET else 0
    found = complete_settings(section, folder)
    bits, size = _bits_and_size(folder, found, GPTQ)
    return PackedFormat(GPTQ, bits, size, found["sym"], (offset,), found["desc_act"] and size > 0)


def _bits_and_size(folder: Path, settings: JsonObject, method: str) -> tuple[int, int]:
    bits, size = settings["bits"], settings["group_size"]
    allowed = (4,) if method == AWQ else (4, 8)
    if bits not in allowed:
        listed = " and ".join(map(str, allowed))
        raise FlexQuantError(f"{folder} has {bits} bits a weight; of {method} only {listed} are read")
    if not (size > 0 or (size == -1 and method == GPTQ)):
        raise wrong_setting(folder, "group_size", size, "a number of inputs or, for GPTQ, -1")
    return bits, size


def from_packed_format(folder: Path, section: JsonObject, tensors: Tensors) -> Read:
    """Read AWQ, GPTQ and AutoRound's exports in these; raise FlexQuantError for what does not fit."""
    base = read_settings(folder, section)
    names = [key.removesuffix(".qweight") for key in tensors if key.endswith(".qweight")]
    if not names:
        problem = f"{folder} has no linear in the format of {base.method} (no tensor is named '*.qweight')"
        advice = "take a checkpoint that is not packed for one kernel, such as marlin's"
        raise FlexQuantError(f"{problem}; {advice}")
    linears = dict.fromkeys(names, base)
    if section["quant_method"] == GPTQ:
        linears |= _read_dynamic(folder, section, names)
    parts = {name for name in tensors if name.endswith(PACKED_PARTS) and name.rpartition(".")[0] in linears}
    found = {name: ref for name, ref in tensors.items() if name not in parts}
    for name, form in linears.items():
        for part in ("weight", "weight_packed"):
            if f"{name}.{part}" in tensors:
                problem = f"{folder} has {name}.{part} beside {name}.qweight"
                raise FlexQuantError(f"{problem}; a linear is stored once: get the checkpoint again")
        found |= _linear(name, form, tensors)
    return {name: form.scheme() for name, form in linears.items()}, found


def _linear(module: str, form: PackedFormat, tensors: Tensors) -> dict[str, TensorRef]:
    """Return a linear's tensors; raise FlexQuantError unless what is stored fits the settings."""
    part = {name: tensors.get(f"{module}.{name}") for name in ("scales", "qzeros", "g_idx")}
    part["qweight"] = qweight = tensors[f"{module}.qweight"]
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
        ref = part[name]
        if ref is None and name in needed:
            raise FlexQuantError(f"{module}.{name} is missing; get the checkpoint again")
        if ref is not None and (ref.dtype not in dtypes or ref.shape != shape):
            wanted = f"{' or '.join(dtypes)} {list(shape)}"
            advice = "correct bits and group_size in the quantization_config, or get the checkpoint again"
            stored = f"{module}.{name} is {ref.dtype} {list(ref.shape)}"
            raise FlexQuantError(f"{stored} instead of {wanted}; {advice}")
    scales, qzeros, g_idx = part["scales"], part["qzeros"], part["g_idx"]
    assert scales is not None
    in_order = torch.arange(inputs) // (form.group_size if form.group_size > 0 else inputs)
    if form.reordered if g_idx is None else not torch.equal(load_tensor(g_idx).long(), in_order):
        problem = f"{module} was quantised with its inputs in another order (desc_act)"
        undone = "which the kernels for compressed-tensors do not undo"
        raise FlexQuantError(f"{problem}, {undone}; take a checkpoint without desc_act")
    if form.symmetric and qzeros is not None and not form.is_symmetric(load_tensor(qzeros)):
        problem = f"{module} has zero points beside {form.middle}, though its quantization_config says 'sym'"
        raise FlexQuantError(f"{problem}; get the checkpoint again")
    weight, words, size = f"{module}.weight", -(-inputs // values), torch.tensor([outputs, inputs])
    found: list[TensorRef] = [
        _transformed(f"{weight}_packed", qweight, "I32", (outputs, words), form.pack_weight),
        _transformed(f"{weight}_scale", scales, scales.dtype, (outputs, groups), torch.t),
        ComputedTensor(f"{weight}_shape", "I64", (2,), qweight.file, 0, lambda rows: of_rows(size, rows)),
    ]
    if not form.symmetric and qzeros is not None:
        shape = (-(-outputs // values), groups)
        found.append(_transformed(f"{weight}_zero_point", qzeros, "I32", shape, form.pack_zero_points))
    return {ref.name: ref for ref in found}


_last = threading.local()
"""The tensor that a thread converted last, and its key: it is read a few rows at a time."""


def _transformed(
    name: str, stored: TensorRef, dtype: str, shape: tuple[int, ...], convert: Callable[[Tensor], Tensor]
) -> TensorRef:
    key = object()

    def compute(rows: Sequence[range] | None) -> Tensor:
        if getattr(_last, "key", None) is not key:
            _last.key, _last.tensor = key, convert(load_tensor(stored))
        tensor: Tensor = _last.tensor
        return of_rows(tensor, rows)

    return ComputedTensor(name, dtype, shape, stored.file, 0, compute)


def of_rows(whole: Tensor, rows: Sequence[range] | None) -> Tensor:
    """Return these rows of a tensor, or all, as a :class:`ComputedTensor` does."""
    return whole if rows is None else torch.cat([whole[part.start : part.stop] for part in rows])
