# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Compute the INT8 weights of a nested variant from another variant's INT4 weights and stored differences.

FORMAT.md has the arithmetic. Every operation is rounded to float32 on its own, so that all machines get the
same integers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexquant.checkpoint.safetensors_io import ComputedTensor, TensorRef, Tensors, load_tensor
from flexquant.checkpoint.schemes import (
    COLUMN,
    DIFFERENCE,
    EXCEPTION,
    EXCEPTION_INPUT,
    FLOAT_DTYPES,
    INT4_IN_WORD,
    ROW,
    unpacked_shape,
)
from flexquant.errors import FlexQuantError

if TYPE_CHECKING:
    from torch import Tensor

LEAST, LARGEST = -128, 127
LOWEST, HIGHEST = -8, 7
"""Ends of the differences; one is stored as a nibble, minus LOWEST."""
INPUTS_OF_AN_EXCEPTION = 128
"""A row has an exception for each so many inputs, and for a rest."""
WEIGHTS_AT_A_TIME = 1 << 18


def count_exceptions(inputs: int) -> int:
    """Return how many INT8 weights of an output are stored whole."""
    return -(-inputs // INPUTS_OF_AN_EXCEPTION)


@dataclass(frozen=True)
class Int4Weight:
    """An INT4 linear's weight on disk, [outputs, inputs]; rows of it are read at a time."""

    packed: TensorRef
    scale: TensorRef
    zero_point: TensorRef | None
    """None: symmetric."""
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Tensors, module: str) -> Int4Weight | None:
        """Return a module's weight, None if it has no sound one; raise FlexQuantError for an unfit shape."""
        names = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
        packed, scale, zero_point, stored = (tensors.get(f"{module}.{name}") for name in names)
        if packed is None or scale is None or packed.dtype != "I32" or len(packed.shape) != 2:
            return None
        outputs, inputs = shape = unpacked_shape(packed, stored)
        groups = scale.shape[-1] if len(scale.shape) == 2 else 0
        words = (-(-outputs // INT4_IN_WORD) if zero_point and zero_point.dtype == "I32" else outputs, groups)
        if not outputs or not groups or inputs % groups or packed.shape[1] != -(-inputs // INT4_IN_WORD):
            return None
        if scale.shape != (outputs, groups) or scale.dtype not in FLOAT_DTYPES:
            return None
        sound = zero_point is None or (zero_point.shape == words and zero_point.dtype in ("I32", "I8"))
        return cls(packed, scale, zero_point, shape) if sound else None

    def read(self, rows: range) -> tuple[Tensor, Tensor]:
        """Return rows' integers less zero points, and scales: float32 [rows, groups, inputs], [..., 1]."""
        if getattr(_last, "weight", None) != self:
            stored, outputs = self.zero_point, self.shape[0]
            zero = None if stored is None else load_zero_points(stored, 4, outputs)
            _last.scale, _last.zero = load_tensor(self.scale).float(), zero
            _last.weight = self
        scale, zero = _last.scale[rows.start : rows.stop, :, None], _last.zero
        values = unpack(load_tensor(self.packed, [rows]), 4, self.shape[1]).float()
        values = values.view(len(rows), scale.shape[1], -1)
        return values if zero is None else values.sub_(zero[rows.start : rows.stop, :, None]), scale


_last = threading.local()
"""The weight that a thread read last, its scales and zero points: its rows are read a few at a time."""


@dataclass(frozen=True)
class NestedWeight:
    """The INT8 weight of a nested variant's linear: what is stored of it, and the INT4 weight."""

    int4: Int4Weight
    stored: Tensors
    """By the last part of their names; types and shapes are those of :func:`nested_parts`."""

    @property
    def parts(self) -> list[TensorRef]:
        """The stored tensors that it is computed from."""
        int4 = self.int4
        of_source = (int4.packed, int4.scale, int4.zero_point)
        return [*(ref for ref in of_source if ref is not None), *self.stored.values()]

    def predicted(self, rows: range) -> Tensor:
        """Return what rows of the INT4 weight predict, whole numbers, float32 [rows, inputs]."""
        row, column = load_tensor(self.stored[ROW], [rows]), load_tensor(self.stored[COLUMN])
        return predict(*self.int4.read(rows), row, column)

    def read(self, rows: Sequence[range] | None) -> Tensor:
        """Return rows of the INT8 weight, int8 [rows, inputs]; raise FlexQuantError for damaged parts."""
        import torch

        found = []
        for part in blocks(self.int4.shape, rows):
            refs = (self.stored[name] for name in (DIFFERENCE, EXCEPTION, EXCEPTION_INPUT))
            difference, exception, stored_input = (load_tensor(ref, [part]) for ref in refs)
            weight = self.predicted(part).add_(unpack_nibbles(difference)).add_(LOWEST)
            if not bool(((weight >= LEAST) & (weight <= LARGEST)).all()):
                raise _damaged(self.stored[DIFFERENCE], f"gives weights beyond {LEAST} to {LARGEST}")
            inputs = stored_input.long()
            if not bool((inputs.diff(dim=1) > 0).all() and (inputs < weight.shape[1]).all()):
                ascending = f"names inputs that do not ascend within 0 to {weight.shape[1] - 1}"
                raise _damaged(self.stored[EXCEPTION_INPUT], ascending)
            found.append(weight.to(torch.int8).scatter_(1, inputs, exception))
        return torch.cat(found)


def _damaged(ref: TensorRef, problem: str) -> FlexQuantError:
    return FlexQuantError(f"'{ref.name}' in {ref.file} {problem}; fetch or merge the checkpoint again")


def nested_parts(outputs: int, inputs: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return type and shape of each tensor stored of a nested linear, by the last part of its name."""
    exceptions = count_exceptions(inputs)
    return {
        DIFFERENCE: ("U8", (outputs, inputs // 2)),
        ROW: ("F32", (outputs, 1)),
        COLUMN: ("F32", (inputs,)),
        EXCEPTION: ("I8", (outputs, exceptions)),
        EXCEPTION_INPUT: ("U16", (outputs, exceptions)),
    }


def nested_weights(own: Tensors, source: Tensors) -> dict[str, NestedWeight]:
    """Return the linears of ``own`` that are nested in ``source``, by the original key of the served weight.

    Raises FlexQuantError, naming the tensor, for stored parts that are missing or do not fit.
    """
    found = {}
    for name, difference in own.items():
        module, _, last = name.rpartition(".")
        if last != DIFFERENCE:
            continue
        int4 = Int4Weight.of(source, module)
        outputs, inputs = int4.shape if int4 is not None else (0, 0)
        expected = nested_parts(outputs, inputs)
        stored = {part: own[f"{module}.{part}"] for part in expected if f"{module}.{part}" in own}
        fits = {part: (ref.dtype, ref.shape) for part, ref in stored.items()} == expected
        if int4 is None or not fits or inputs % 2:
            others = ", ".join(part for part in expected if part != DIFFERENCE)
            problem = f"is damaged: its {others} and INT4 weight are not there or do not fit it"
            raise _damaged(difference, problem)
        found[f"{module}.weight"] = NestedWeight(int4, stored)
    return found


def with_weights(own: Tensors, nested: Mapping[str, NestedWeight]) -> dict[str, TensorRef]:
    """Return a nested variant's tensors as it is served: INT8 weights in place of what they come from."""
    parts = [(name, part) for name, weight in nested.items() for part in weight.stored]
    gone = {f"{name}{part.removeprefix('weight')}" for name, part in parts}
    found = {name: ref for name, ref in own.items() if name not in gone}
    for name, weight in nested.items():
        ref = weight.stored[DIFFERENCE]
        found[name] = ComputedTensor(name, "I8", weight.int4.shape, ref.file, ref.begin, weight.read)
    return found


def blocks(shape: tuple[int, ...], rows: Sequence[range] | None = None) -> Iterator[range]:
    """Yield rows of a matrix, or parts of ``rows``, of about WEIGHTS_AT_A_TIME weights."""
    step = max(1, WEIGHTS_AT_A_TIME // shape[1])
    for part in [range(shape[0])] if rows is None else rows:
        for start in range(part.start, part.stop, step):
            yield range(start, min(start + step, part.stop))


def predict(values: Tensor, scale: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Return the nearest integers, ties to even, to ``values * (scale * row) * column`` [rows, inputs].

    ``values`` and ``scale`` are as of :meth:`Int4Weight.read`; ``row`` is [rows, 1], ``column`` [inputs].
    """
    return scaled(values, scale, row, column).round_()


def scaled(values: Tensor, scale: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Return the same before it is rounded to integers."""
    return (values * (scale * row.unsqueeze(-1))).flatten(1).mul_(column)


def unpack_nibbles(stored: Tensor) -> Tensor:
    """Return 4-bit values, uint8 [rows, inputs], from U8 [rows, inputs / 2]; a low nibble comes first."""
    import torch

    return torch.stack((stored & 15, stored >> 4), dim=-1).flatten(1)


def unpack(packed: Tensor, num_bits: int, in_features: int) -> Tensor:
    """Unpack int32 words, lowest bits first, into signed integers, int8 [rows, in]."""
    if num_bits == 4:  # widen each byte to 16 bits, so that each of its two integers gets a byte
        import torch

        pairs = packed.view(torch.uint8).to(torch.int16)
        pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F)
        return pairs.view(torch.int8).sub_(8)[:, :in_features]
    return _unpack(packed, num_bits, (len(packed), in_features), 1)


def load_zero_points(stored: TensorRef, num_bits: int, outputs: int) -> Tensor:
    """Return a linear's zero points as signed integers [outputs, groups]; int32 words are unpacked."""
    zero_points = load_tensor(stored)
    if stored.dtype != "I32":
        return zero_points
    return _unpack(zero_points, num_bits, (outputs, zero_points.shape[1]), 0)


def _unpack(packed: Tensor, num_bits: int, shape: tuple[int, int], dimension: int) -> Tensor:
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    return unpack_from_int32(packed, num_bits, torch.Size(shape), packed_dim=dimension)
