# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read Linear weights of a compressed-tensors checkpoint as float32, with the variance of their rounding.

Rounding to a grid of width ``step`` has a uniform error of variance ``step^2 / 12``. The step of an integer
grid is the scale; the step of a floating-point grid is one unit in the last place of each value.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.transform import TransformConfig, TransformLocation, TransformScheme
from compressed_tensors.transform.utils.hadamard import deterministic_hadamard_matrix
from torch import Tensor

from flexquant.checkpoint.loadable import ROUTERS
from flexquant.checkpoint.module_names import EMBEDDINGS, EXPERTS, LATENT_UP
from flexquant.checkpoint.nested import load_zero_points, unpack
from flexquant.checkpoint.patterns import Patterns
from flexquant.checkpoint.safetensors_io import TensorRef, is_finite, load_tensor
from flexquant.checkpoint.schemes import (
    FLOAT_DTYPES,
    LINEAR,
    PACKED_SUFFIX,
    LinearSchemes,
    is_readable,
    mantissa_bits,
    shape_problem,
    stored_shape,
)
from flexquant.errors import FlexQuantError
from flexquant.merge.formats import Source
from flexquant.merge.kv.agreement import ScaledRows, row_numbers

E4M3_MANTISSA, E4M3_MIN_EXPONENT = 3, -6
FLOAT32_EXPONENT = 0x7F800000
PART = "_input"
"""What vLLM and compressed-tensors append to a rotation's name, for the module that has its matrix."""


class WeightReader:
    """Dequantises the Linears of one source; it keeps only each thread's last chunk in memory."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._memory = threading.local()  # one buffer a thread: allocating takes longer than filling
        self.schemes = LinearSchemes(source.quantization_config, source.owner, source.tensors)
        self.rotations = InputRotations(source)

    def shape(self, module: str) -> tuple[int, int]:
        """Return (out_features, in_features)."""
        out_features, in_features = stored_shape(self.stored(module), partial(self.ref, module))
        return out_features, in_features

    def weight_args(self, module: str) -> QuantizationArgs:
        """Return how a Linear's weight is quantised; raise FlexQuantError for 16 bit and unfit shapes."""
        scheme, stored = self.schemes.of(module), self.stored(module)
        if scheme is None or scheme.weights is None:
            raise self.error(module, f"is stored as {stored.dtype}, but no config group quantises it")
        args, form = scheme.weights, self.schemes.format_of(scheme)
        if not is_readable(args, form):
            scheme_text = f"{form} ({args.num_bits}-bit {args.type}, {args.strategy})"
            advice = "which cannot be compared; use INT4, INT8 or FP8 weights"
            raise self.error(module, f"has the scheme {scheme_text}, {advice}")
        if problem := shape_problem(args, stored, partial(self.ref, module)):
            raise self.error(module, f"{problem}; quantise it again")
        return args

    def open(self, module: str) -> StoredLinear:
        """Read the scales and zero points of a Linear; raise FlexQuantError as :class:`StoredLinear` does."""
        return StoredLinear(self, module)

    def is_quantised(self, module: str) -> bool:
        """Whether a Linear's weight is stored in fewer than 16 bits."""
        return not _is_float(self.stored(module))

    def as_floats(self, raw: Tensor) -> Tensor:
        """Return a matrix as float32, in a buffer that the thread's next call overwrites."""
        buffer: Tensor | None = getattr(self._memory, "floats", None)
        if buffer is None or buffer.numel() < raw.numel():
            buffer = self._memory.floats = torch.empty(raw.numel(), dtype=torch.float32)
        return buffer[: raw.numel()].view(raw.shape).copy_(raw)

    def stored(self, module: str) -> TensorRef:
        ref = self.ref(module, "weight_packed") or self.ref(module, "weight")
        if ref is None:
            raise self.error(module, "has neither weight nor weight_packed")
        if len(ref.shape) != 2 or not all(ref.shape):
            raise self.error(module, f"has a weight of shape {list(ref.shape)}, expected a matrix")
        return ref

    def ref(self, module: str, parameter: str) -> TensorRef | None:
        return self.source.tensors.get(f"{module}.{parameter}")

    def error(self, module: str, problem: str) -> FlexQuantError:
        return FlexQuantError(f"layer '{module}' of {self.source.owner} {problem}")


class StoredLinear:
    """A Linear's matrix for inputs that are not rotated, whose weight stays on disk.

    Raises FlexQuantError for an unsupported scheme or rotation, and for scales that are not finite.
    """

    def __init__(self, reader: WeightReader, module: str) -> None:
        self._reader, self._module = reader, module
        self.shape = reader.shape(module)
        """(out_features, in_features)."""
        self._stored = reader.stored(module)
        self._rotation = reader.rotations.of(module, self.shape[1])
        if _is_float(self._stored):
            return
        self._args = reader.weight_args(module)
        self._scale = self._finite(load_tensor(reader.source.tensors[f"{module}.weight_scale"]).float())
        stored = None if self._args.type == "float" else reader.ref(module, "weight_zero_point")
        self._zero_point = None
        if stored is not None:
            self._zero_point = load_zero_points(stored, self._args.num_bits, self.shape[0]).float()

    def read(self, rows: Sequence[range] | None = None) -> ScaledRows:
        """Return rows, or all, until the thread's next read; raise FlexQuantError for NaN or infinity."""
        stored = self._read(rows)
        return stored if self._rotation is None else _turned_back(stored, self._rotation)

    def _read(self, rows: Sequence[range] | None) -> ScaledRows:
        rows = [range(self.shape[0])] if rows is None else rows
        raw = load_tensor(self._stored, rows)
        ones = torch.ones(len(raw), dtype=torch.float32)
        if _is_float(self._stored):
            values = self._finite(self._reader.as_floats(raw))
            return ScaledRows(values, _ulp(values, mantissa_bits(self._stored), -126) ** 2 / 12, ones)
        if _is_packed(self._stored):
            raw = unpack(raw, self._args.num_bits, self.shape[1])
        index = row_numbers(rows)
        values, scale = self._reader.as_floats(raw), self._of_rows(self._scale, index)
        if self._zero_point is not None:
            zero_point = self._of_rows(self._zero_point, index)
            _in_groups(values, zero_point).sub_(zero_point[:, :, None])
        if self._args.type == "float":
            variance = _ulp(self._finite(values), E4M3_MANTISSA, E4M3_MIN_EXPONENT) ** 2 / 12
        else:
            variance = torch.full((1, 1), 1 / 12, dtype=torch.float32)
        if scale.shape[1] == 1:
            return ScaledRows(values, variance, scale[:, 0] * ones)
        _in_groups(values, scale).mul_(scale[:, :, None])
        if variance.shape[1] == 1:
            return ScaledRows(values, scale * scale * variance, ones)
        _in_groups(variance, scale).mul_(scale[:, :, None] ** 2)
        return ScaledRows(values, variance, ones)

    def _of_rows(self, per_group: Tensor, index: Tensor) -> Tensor:
        """Return scales or zero points of the rows at ``index``, [rows or 1, groups of equal width]."""
        if per_group.numel() == 1:
            return per_group.reshape(1, 1)
        is_block = self._args.strategy == "block"
        height, width = self._args.block_structure if is_block else (1, self._args.group_size)
        per_group = per_group[index // height]
        if per_group.shape[1] == 1 or per_group.shape[1] * width == self.shape[1]:
            return per_group
        return per_group.repeat_interleave(width, dim=1)[:, : self.shape[1]]  # the last block is narrower

    def _finite(self, numbers: Tensor) -> Tensor:
        if not is_finite(numbers):
            problem = "holds NaN or infinite weights or scales; quantise it again"
            raise self._reader.error(self._module, problem)
        return numbers


def _is_packed(weight: TensorRef) -> bool:
    return weight.name.endswith(PACKED_SUFFIX)


def _is_float(weight: TensorRef) -> bool:
    return weight.dtype in FLOAT_DTYPES and not _is_packed(weight)


def _in_groups(x: Tensor, per_group: Tensor) -> Tensor:
    """Return [rows, in] viewed as [rows, groups, columns of a group]."""
    return x.view(len(x), per_group.shape[1], -1)


def _ulp(values: Tensor, mantissa_bits: int, min_exponent: int) -> Tensor:
    """Return the distance between neighbouring floating-point numbers at each value."""
    power = (values.view(torch.int32) & FLOAT32_EXPONENT).view(torch.float32)  # largest power of two <= value
    return power.clamp_min_(2.0**min_exponent).mul_(2.0**-mantissa_bits)


class InputRotations:
    """Undoes rotations of inputs (QuIP's V, SpinQuant's and QuaRot's R4) that run with one source's model.

    Such inputs are multiplied by an orthogonal V before all else, block by block, and W V is stored in place
    of the linear's matrix W. As in vLLM, a stored V is divided by the square root of its size.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        section = source.quantization_config.get("transform_config") or {}
        groups = TransformConfig.model_validate(section).config_groups if section else {}
        modules = [LINEAR, *dict.fromkeys(name.rpartition(".")[0] for name in source.tensors)]
        self._online = [
            (name, scheme, args, *(Patterns(p, modules, source.owner) for p in (args.targets, args.ignore)))
            for name, scheme in groups.items()
            for args in scheme.apply
            if args.location == TransformLocation.INPUT
        ]
        parts = tuple(f".{name}{PART}.weight" for name, *_ in self._online)
        self.tensors = {name for name in source.tensors if parts and name.endswith(parts)}
        """Names of the tensors that hold rotations."""

    def of(self, module: str, inputs: int) -> Tensor | None:
        """Return what blocks of a linear's stored rows are multiplied by, float32 [block, block], or None.

        Raises FlexQuantError for a matrix that is missing or does not fit, and inputs that vLLM leaves.
        """
        found = None
        if f"{module}.".endswith(tuple(f"{name}." for name in EMBEDDINGS)):
            return None
        for name, scheme, args, *patterns in self._online:
            targeted, ignored = (p.first(module) or p.first(LINEAR) for p in patterns)
            if targeted and not ignored:
                matrix = self._matrix(module, name, scheme, scheme.head_dim or inputs)
                found = matrix if args.inverse else matrix.t()
        by_itself = module.rpartition(".")[2] in (*ROUTERS, "lm_head")
        if found is not None and (by_itself or EXPERTS.match(f"{module}.") or LATENT_UP.match(f"{module}.")):
            raise self._error(module, "by its config, and not by vLLM, which has no such rotations for it")
        if found is not None and inputs % len(found):
            raise self._error(module, f"in blocks of {len(found)}, which do not divide its {inputs} inputs")
        return found

    def _matrix(self, module: str, name: str, scheme: TransformScheme, size: int) -> Tensor:
        """Return the rotation ``name``; linears with inputs of one size share it, and one has it on disk."""
        own = f"{module}.{name}{PART}.weight"
        shared = sorted(key for key in self.tensors if key.endswith(f".{name}{PART}.weight"))
        for key in [own, *shared]:
            ref = self._source.tensors.get(key)
            if ref is not None and ref.shape == (size, size):
                return load_tensor(ref).float() / size**0.5
        if scheme.type != "hadamard" or size & (size - 1):
            raise self._error(module, f"by '{name}', whose matrix [{size}, {size}] is not in the checkpoint")
        whole: Tensor = deterministic_hadamard_matrix(size, torch.float32, torch.device("cpu"))
        return whole / size**0.5

    def _error(self, module: str, problem: str) -> FlexQuantError:
        found = f"the inputs of '{module}' of {self._source.owner} are rotated {problem}"
        return FlexQuantError(f"{found}, so it cannot be compared; quantise it again")


def _turned_back(stored: ScaledRows, rotation: Tensor) -> ScaledRows:
    """Return rows of a linear's matrix from stored ones and what :meth:`InputRotations.of` returns."""
    size, variance = len(rotation), stored.variance
    if variance.shape[1] > 1:
        width = stored.values.shape[1] // variance.shape[1]
        variance = _by_block(variance.repeat_interleave(width, dim=1), rotation.square(), size)
    return replace(stored, values=_by_block(stored.values, rotation, size), variance=variance)


def _by_block(rows: Tensor, matrix: Tensor, size: int) -> Tensor:
    return (rows.view(len(rows), -1, size) @ matrix).flatten(1)
