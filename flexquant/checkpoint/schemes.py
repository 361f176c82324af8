# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Find how a checkpoint is quantised (compressed-tensors): its parameters without packing, and the schemes.

The shapes of the parameters of quantised Linears are checked against their schemes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Literal

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.safetensors_io import TensorRef, read_chunks
from flexquant.errors import FlexQuantError

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

PACKED_SUFFIX = "_packed"
WORD_BITS = 32
"""Bits of the int32 words that hold packed integers of at most 8 bits."""
INT4_IN_WORD = 8
# Parameters that compressed-tensors, AWQ and GPTQ add beside a module's own.
QUANTISATION_PARAMETER = re.compile(
    r"\.((weight|input|output|q|k|v|attn|prob)_(scale|zero_point|global_scale|g_idx|shape)"
    r"|qzeros|scales|g_idx)$"
)
TensorShape = tuple[int, ...]


def logical_shapes(tensors: Mapping[str, TensorRef]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the unquantised model, by name.

    ``weight_packed`` counts as ``weight`` with the shape stored in ``weight_shape``, AWQ's and GPTQ's
    ``qweight`` as ``weight`` with the outputs of ``scales``. Raises FlexQuantError for a ``weight_packed`` of
    integers without that shape, or with one that does not fit it.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, ref in tensors.items():
        if name.endswith(PACKED_SUFFIX):
            name = name.removesuffix(PACKED_SUFFIX)
            shapes[name] = unpacked_shape(name, ref, tensors.get(f"{name}_shape"))
        elif name.endswith(".qweight") and (scales := tensors.get(name.replace(".qweight", ".scales"))):
            outputs, values = scales.shape[-1], math.prod(ref.shape) * INT4_IN_WORD
            shapes[name.replace(".qweight", ".weight")] = (outputs, values // outputs)
        elif not QUANTISATION_PARAMETER.search(name):
            shapes[name] = ref.shape
    return shapes


def unpacked_shape(name: str, packed: TensorRef, stored: TensorRef | None) -> tuple[int, ...]:
    """Return the shape of the parameter ``name``, which ``packed`` holds; ``stored`` holds the shape.

    Raises FlexQuantError if ``stored`` is missing, or does not fit the packed words.
    """
    if stored is None and packed.dtype == "U8" and packed.shape:  # FP4 formats: two values a byte
        return (*packed.shape[:-1], packed.shape[-1] * 2)
    if stored is None:
        raise FlexQuantError(
            f"{packed.file} holds '{packed.name}' without '{name}_shape'; quantise the model again"
        )
    shape = _read_integers(stored, len(packed.shape))
    fits = packed.shape and shape[:-1] == packed.shape[:-1]
    if not fits or not 1 <= shape[-1] <= packed.shape[-1] * WORD_BITS:
        raise FlexQuantError(
            f"{stored.file} holds '{stored.name}' {list(shape)}, which does not fit '{packed.name}' of shape "
            f"{list(packed.shape)}; quantise the model again"
        )
    return shape


def _read_integers(ref: TensorRef, count: int) -> tuple[int, ...]:
    codes: dict[str, Literal["q", "i"]] = {"I64": "q", "I32": "i"}
    if (code := codes.get(ref.dtype)) is None or ref.shape != (count,):
        raise FlexQuantError(
            f"{ref.file} holds '{ref.name}' as {ref.dtype} {list(ref.shape)}, expected I64 or I32 [{count}]"
        )
    return tuple(number for chunk in read_chunks(ref) for number in chunk.cast(code))


class LinearSchemes:
    """The schemes of a checkpoint's Linears, by module name."""

    def __init__(self, section: JsonObject, owner: str) -> None:
        """Read ``section``, a ``quantization_config``.

        Raises FlexQuantError, which begins with ``owner``, for a section that compressed-tensors refuses.
        """
        import torch

        self._config = _parse(section, owner)
        self._groups = [g for g in self._config.config_groups.values() if not isinstance(g, list)]
        self._linear = torch.nn.Linear(1, 1, device="meta")  # stands for any module of the class

    @property
    def format(self) -> str:
        """Storage format of weights whose scheme does not state one."""
        return self._config.format

    def of(self, module: str) -> QuantizationScheme | None:
        """Return the scheme of a Linear; None if it is left in 16 bits."""
        from compressed_tensors.utils.match import is_match, match_name

        if is_match(module, self._linear, self._config.ignore or ()):
            return None
        for group in self._groups:  # a name is more specific than a class
            if any(match_name(module, target) for target in group.targets):
                return group
        return next((g for g in self._groups if is_match(module, self._linear, g.targets)), None)


def _parse(section: JsonObject, owner: str) -> QuantizationConfig:
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.transform import TransformConfig
    from compressed_tensors.utils.match import match_name

    try:
        config = QuantizationConfig.model_validate(section)
        groups = [group.targets for group in config.config_groups.values() if not isinstance(group, list)]
        for name in chain(config.ignore or (), *groups):
            match_name("", name)  # compiles it, if it is a regular expression
        if transforms := section.get("transform_config"):
            TransformConfig.model_validate(transforms)
        return config
    except (ValueError, TypeError, KeyError, NotImplementedError, OverflowError, re.error) as e:
        problem = " ".join(str(e).split())
        raise FlexQuantError(
            f"{owner} has a quantization_config that is not understood ({problem}); quantise the model again "
            "with a supported release of llmcompressor"
        ) from e


def shape_problem(
    args: QuantizationArgs, shape: tuple[int, int], weight: TensorRef, part: Callable[[str], TensorRef | None]
) -> str:
    """Return how a Linear's parameters do not fit its scheme; empty if they do.

    ``args`` describe INT weights of 2, 4 or 8 bits, or FP8. ``shape`` is (out_features, in_features),
    ``weight`` the stored weight. ``part`` returns another parameter of the Linear by the last part of its
    name, e.g. ``weight_scale``.
    """
    if args.actorder in ("group", "dynamic") or part("weight_g_idx") is not None:
        return (
            "was quantised with its inputs in another order (actorder 'group', weight_g_idx), which vLLM "
            "does not undo (actorder 'static' keeps their order)"
        )
    rows, columns = shape
    packed = weight.name.endswith(PACKED_SUFFIX)
    dtype = "I32" if packed else "I8" if args.type == "int" else "F8_E4M3"
    if weight.dtype != dtype:
        return f"has its weight as {weight.dtype}, expected {dtype}"
    expected = (rows, math.ceil(columns * args.num_bits / WORD_BITS)) if packed else shape
    if weight.shape != expected:
        return f"has a weight of shape {list(weight.shape)}, expected {list(expected)}"
    if args.strategy == "block" and min(args.block_structure) < 1:
        return f"has blocks of {list(args.block_structure)}, expected numbers from 1"
    of_scale = _scale_shapes(args, rows, columns)
    scale, zero_point, bias = (part(name) for name in ("weight_scale", "weight_zero_point", "bias"))
    if scale is None:
        return "has no weight_scale"
    allowed: dict[str, tuple[TensorRef | None, list[TensorShape]]] = {
        "weight_scale": (scale, of_scale),
        "weight_zero_point": (zero_point, _zero_point_shapes(args, rows, of_scale, zero_point)),
        "bias": (bias, [(rows,)]),
    }
    for name, (ref, shapes) in allowed.items():
        if ref is not None and ref.shape not in shapes:
            listed = " or ".join(str(list(shape)) for shape in shapes)
            return f"has a {name} of shape {list(ref.shape)}, expected {listed}"
    if zero_point is None and args.type == "int" and not args.symmetric:
        return "is asymmetric but has no weight_zero_point"
    return ""


def _scale_shapes(args: QuantizationArgs, rows: int, columns: int) -> list[TensorShape]:
    if args.strategy == "tensor":
        return [(1,), (1, 1), ()]
    if args.strategy == "block":
        height, width = args.block_structure
        return [(math.ceil(rows / height), math.ceil(columns / width))]
    groups = math.ceil(columns / args.group_size) if args.strategy == "group" else 1
    return [(rows, groups), *([(rows,)] if groups == 1 else [])]


def _zero_point_shapes(
    args: QuantizationArgs, rows: int, of_scale: list[TensorShape], ref: TensorRef | None
) -> list[TensorShape]:
    if ref is None or ref.dtype != "I32":
        return of_scale
    words = math.ceil(rows * args.num_bits / WORD_BITS)  # packed along the rows
    return [(words, of_scale[0][-1])]
