# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read Linear weights of a compressed-tensors checkpoint as float32, with the rounding noise they carry.

The noise lives beside the scales because it follows from them: rounding to a grid of width ``step`` errs
uniformly, with variance ``step^2 / 12``. An integer grid's step is the scale; a floating-point grid's is
one unit in the last place of each value.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs

from flexquant.checkpoint.safetensors_io import TensorRef, load_tensor
from flexquant.checkpoint.schemes import LinearSchemes
from flexquant.checkpoint.source import Source
from flexquant.errors import FlexQuantError

READABLE_FORMATS = frozenset(
    {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense"}
)
READABLE_STRATEGIES = frozenset({"tensor", "channel", "group", "block"})
INTEGER_BITS = (2, 4, 8)  # other widths are packed differently by different compressed-tensors releases
FLOAT_DTYPES = {"BF16": 7, "F16": 10, "F32": 23}  # stored bits of mantissa
E4M3_MANTISSA, E4M3_MIN_EXPONENT = 3, -6


@dataclass(frozen=True)
class Dequantized:
    weight: torch.Tensor
    """float32 [rows, in]."""
    variance: torch.Tensor
    """Expected squared rounding error of every weight, float32, broadcastable to the weight's shape."""


class WeightReader:
    """Dequantises the Linear layers of one source; holds no tensors."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.schemes = LinearSchemes(source.quantization_config, f"variant '{source.name}'")

    def shape(self, module: str) -> tuple[int, int]:
        """Return (out_features, in_features)."""
        if (shape := self._ref(module, "weight_shape")) is not None:
            out_features, in_features = load_tensor(shape).tolist()
        else:
            out_features, in_features = self._stored(module).shape
        return out_features, in_features

    def read(self, module: str, start: int = 0, stop: int | None = None) -> Dequantized:
        """Return rows ``start:stop`` of a Linear's weight; only these rows are read.

        Raises FlexQuantError, naming the scheme, for one that is not understood.
        """
        out_features, in_features = self.shape(module)
        stop = out_features if stop is None else stop
        stored = self._stored(module)
        if stored.dtype in FLOAT_DTYPES:
            weight = load_tensor(row_range(stored, start, stop)).float()
            self._check_finite(module, weight)
            return Dequantized(weight, _ulp(weight, FLOAT_DTYPES[stored.dtype], -126) ** 2 / 12)
        args = self._weight_args(module, stored)
        raw = load_tensor(row_range(stored, start, stop))
        if stored.name.endswith("_packed"):
            raw = unpack_from_int32(raw, args.num_bits, torch.Size((stop - start, in_features)))
        values = raw.float()
        spread = self._spreader(module, args, (out_features, in_features), start, stop)
        scale_ref = self._ref(module, "weight_scale")
        if scale_ref is None:
            raise self._error(module, "has no weight_scale")
        scale = spread(load_tensor(scale_ref).float())
        if args.type == "float":
            step = _ulp(values, E4M3_MANTISSA, E4M3_MIN_EXPONENT) * scale
        else:
            step = scale
            if (zero_point := self._zero_point(module, args, out_features)) is not None:
                values -= spread(zero_point.float())
        weight = values * scale
        self._check_finite(module, weight)
        return Dequantized(weight, step**2 / 12)

    def _check_finite(self, module: str, weight: torch.Tensor) -> None:
        if not bool(weight.isfinite().all()):
            raise self._error(module, "holds NaN or infinite weights or scales; quantise it again")

    def _weight_args(self, module: str, stored: TensorRef) -> QuantizationArgs:
        scheme = self.schemes.of(module)
        if scheme is None or scheme.weights is None:
            raise self._error(module, f"is stored as {stored.dtype}, but no config group quantises it")
        args = scheme.weights
        name = str(getattr(scheme.format, "value", scheme.format) or self.schemes.format)
        fp8 = args.type == "float" and args.num_bits == 8 and stored.dtype == "F8_E4M3"
        integer = args.type == "int" and args.num_bits in INTEGER_BITS
        if name not in READABLE_FORMATS or args.strategy not in READABLE_STRATEGIES or not (fp8 or integer):
            raise self._error(
                module,
                f"has the scheme {name} ({args.num_bits}-bit {args.type}, {args.strategy}), which cannot be "
                "compared; use INT4, INT8 or FP8 weights",
            )
        return args

    def _spreader(self, module: str, args: QuantizationArgs, shape: tuple[int, int], start: int, stop: int):
        """Return a function that gives scales or zero points of the whole weight the shape of the rows."""
        g_idx_ref = self._ref(module, "weight_g_idx")
        g_idx = None if g_idx_ref is None else load_tensor(g_idx_ref).long()
        if g_idx is not None and bool((g_idx < 0).any()):  # never filled in
            g_idx = None

        def spread(per_group: torch.Tensor) -> torch.Tensor:
            if per_group.numel() == 1:
                return per_group.reshape(1, 1)
            if per_group.ndim == 1:
                per_group = per_group[:, None]
            if args.strategy == "block":
                height, width = args.block_structure
                rows = torch.arange(start, stop) // height
                return per_group[rows].repeat_interleave(width, dim=1)[:, : shape[1]]
            per_group = per_group[start:stop]
            if per_group.shape[1] == 1:
                return per_group
            if g_idx is not None:
                return per_group[:, g_idx]
            width = args.group_size or shape[1] // per_group.shape[1]
            return per_group.repeat_interleave(width, dim=1)[:, : shape[1]]

        return spread

    def _zero_point(self, module: str, args: QuantizationArgs, out_features: int) -> torch.Tensor | None:
        ref = self._ref(module, "weight_zero_point")
        if ref is None:
            if args.symmetric:
                return None
            raise self._error(module, "is asymmetric but has no weight_zero_point")
        zero_point = load_tensor(ref)
        if zero_point.dtype is torch.int32:  # packed along the rows
            shape = torch.Size((out_features, zero_point.shape[1]))
            zero_point = unpack_from_int32(zero_point, args.num_bits, shape, packed_dim=0)
        return zero_point

    def _stored(self, module: str) -> TensorRef:
        ref = self._ref(module, "weight_packed") or self._ref(module, "weight")
        if ref is None:
            raise self._error(module, "has neither weight nor weight_packed")
        if len(ref.shape) != 2:
            raise self._error(module, f"has a weight of shape {list(ref.shape)}, expected a matrix")
        return ref

    def _ref(self, module: str, parameter: str) -> TensorRef | None:
        return self.source.tensors.get(f"{module}.{parameter}")

    def _error(self, module: str, problem: str) -> FlexQuantError:
        return FlexQuantError(f"layer '{module}' of variant '{self.source.name}' {problem}")


def row_range(ref: TensorRef, start: int, stop: int) -> TensorRef:
    """Return the reference of a tensor's rows ``start:stop``."""
    row_bytes = ref.nbytes // ref.shape[0]
    begin, end = ref.begin + start * row_bytes, ref.begin + stop * row_bytes
    return dataclasses.replace(ref, shape=(stop - start, *ref.shape[1:]), begin=begin, end=end)


def _ulp(values: torch.Tensor, mantissa_bits: int, min_exponent: int) -> torch.Tensor:
    """Return the distance between neighbouring floating-point numbers at each value."""
    exponent = torch.where(values == 0, min_exponent, torch.frexp(values).exponent - 1)
    return torch.ldexp(torch.ones_like(values), exponent.clamp_min(min_exponent) - mantissa_bits)
