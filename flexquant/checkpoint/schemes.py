# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Find how a checkpoint is quantised (compressed-tensors): its unpacked parameters, and its schemes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable
from itertools import chain
from typing import TYPE_CHECKING, Literal

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.module_names import EMBEDDINGS, EXPERTS, FUSED, layer_of
from flexquant.checkpoint.patterns import PREFIX, Patterns
from flexquant.checkpoint.safetensors_io import TensorRef, Tensors, read_chunks
from flexquant.errors import FlexQuantError, said_by

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

PACKED_SUFFIX = "_packed"
DIFFERENCE, ROW, COLUMN = "weight_difference", "weight_row", "weight_column"
EXCEPTION, EXCEPTION_INPUT = "weight_exception", "weight_exception_input"
"""These five are the last parts of the names of what a nested linear has in place of its INT8 weight."""
WORD_BITS = 32
"""Bits of the int32 words that hold packed integers of at most 8 bits."""
INT4_IN_WORD = 8
# Parameters that compressed-tensors, AWQ, GPTQ and nesting add beside a module's own.
QUANTISATION_PARAMETER = re.compile(
    r"\.((weight|input|output|q|k|v|attn|prob)_(scale|zero_point|global_scale|g_idx|shape)"
    rf"|qzeros|scales|g_idx|{ROW}|{COLUMN}|{EXCEPTION}|{EXCEPTION_INPUT})$"
)
ROTATION = re.compile(r"\.[^.]+_input\.weight$")
READABLE_FORMATS = {f"{kind}-quantized" for kind in ("pack", "int", "float", "naive")}
READABLE_FORMATS |= {"mixed-precision", "dense"}
READABLE_STRATEGIES = ("tensor", "channel", "group", "block")
READABLE_BITS = {"int": (2, 4, 8), "float": (8,)}  # releases differ in how they pack other widths
FLOAT_DTYPES = {"BF16": 7, "F16": 10, "F32": 23}  # stored bits of mantissa
IN_ANOTHER_ORDER = (
    "its inputs in another order (actorder 'group', weight_g_idx), which vLLM does not undo (actorder "
    "'static' keeps their order)"
)
LINEAR, ROUTED = "Linear", "RoutedExperts"
OF_HEADS = "ParallelLMHead"
CLASSES = {"lm_head": OF_HEADS} | dict.fromkeys(EMBEDDINGS, "VocabParallelEmbedding")
"""Last part of a module's name -> vLLM's class, where it is not one of its linear layers."""
ORDER = {part: number for number, part in enumerate(FUSED)}


def logical_shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the unquantised model, by name; packed ones are ``weight``.

    Raises FlexQuantError for packed integers without a ``weight_shape`` that fits.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, ref in tensors.items():
        if name.endswith(PACKED_SUFFIX):
            name = name.removesuffix(PACKED_SUFFIX)
            shapes[name] = unpacked_shape(ref, tensors.get(f"{name}_shape"))
        elif name.endswith(".qweight") and (scales := tensors.get(name.replace(".qweight", ".scales"))):
            outputs, values = scales.shape[-1], math.prod(ref.shape) * INT4_IN_WORD
            shapes[name.replace(".qweight", ".weight")] = (outputs, values // outputs)
        elif name.endswith(f".{DIFFERENCE}") and ref.shape:
            shapes[name.replace(DIFFERENCE, "weight")] = (*ref.shape[:-1], ref.shape[-1] * 2)
        elif not QUANTISATION_PARAMETER.search(name) and not _rotates_inputs(name, tensors):
            shapes[name] = ref.shape
    return shapes


def mantissa_bits(*tensors: TensorRef) -> int:
    """Return the stored bits of the shortest mantissa that tensors of FLOAT_DTYPES have or are cast from."""
    dtypes = ((ref.dtype, getattr(ref, "stored_dtype", None)) for ref in tensors)
    return min(FLOAT_DTYPES[dtype] for dtype in chain.from_iterable(dtypes) if dtype in FLOAT_DTYPES)


def transforms_at(section: JsonObject, locations: Collection[str]) -> JsonObject:
    """Return the groups of a ``quantization_config``'s transforms with one at any of these locations."""
    groups = (section.get("transform_config") or {}).get("config_groups") or {}
    return {
        name: group
        for name, group in groups.items()
        if any(apply.get("location") in locations for apply in group.get("apply", ()))
    }


def rotates_in_passes(section: JsonObject) -> bool:
    """Whether a ``quantization_config`` has rotations that are no part of the weights alone."""
    return bool(transforms_at(section, ("input", "output")))


def rotates_in_blocks(section: JsonObject) -> bool:
    """Whether all rotations in passes are of inputs, block by block, as ranks with a part of them can do."""
    groups = transforms_at(section, ("input", "output"))
    return all(of.get("head_dim") for of in groups.values()) and not transforms_at(section, ("output",))


def _rotates_inputs(name: str, tensors: Tensors) -> bool:
    """Whether a tensor is what the inputs of a linear are multiplied by before its weight."""
    linear = ROTATION.sub("", name)
    return linear != name and any(f"{linear}.{own}" in tensors for own in ("weight", "weight_packed"))


def unpacked_shape(packed: TensorRef, stored: TensorRef | None) -> tuple[int, ...]:
    """Return the shape in ``stored`` of what ``packed`` holds; raise FlexQuantError if it does not fit."""
    if stored is None and packed.dtype == "U8" and packed.shape:  # FP4 formats: two values a byte
        return (*packed.shape[:-1], packed.shape[-1] * 2)
    if stored is None:
        lacks = packed.name.removesuffix(PACKED_SUFFIX) + "_shape"
        problem = f"{packed.file} holds '{packed.name}' without '{lacks}'"
        raise FlexQuantError(f"{problem}; quantise the model again")
    shape = _read_integers(stored, len(packed.shape))
    fits = packed.shape and shape[:-1] == packed.shape[:-1]
    if not fits or not 1 <= shape[-1] <= packed.shape[-1] * WORD_BITS:
        problem = f"does not fit '{packed.name}' of shape {list(packed.shape)}; quantise the model again"
        raise FlexQuantError(f"{stored.file} holds '{stored.name}' {list(shape)}, which {problem}")
    return shape


def _read_integers(ref: TensorRef, count: int) -> tuple[int, ...]:
    codes: dict[str, Literal["q", "i"]] = {"I64": "q", "I32": "i"}
    if (code := codes.get(ref.dtype)) is None or ref.shape != (count,):
        found = f"'{ref.name}' as {ref.dtype} {list(ref.shape)}"
        raise FlexQuantError(f"{ref.file} holds {found}, expected I64 or I32 [{count}]")
    return tuple(number for chunk in read_chunks(ref) for number in chunk.cast(code))


class LinearSchemes:
    """The schemes by which vLLM loads linears: by a layer's name, its linears' names, then its class."""

    def __init__(self, section: JsonObject, owner: str, tensors: Iterable[str]) -> None:
        """Read the ``section`` of a checkpoint with ``tensors``; raise FlexQuantError if it is refused."""
        self._owner = owner
        self._config, of_transforms = _parse(section, owner)
        groups = {k: group for k, group in self._config.config_groups.items() if not isinstance(group, list)}
        alone = {k: group.targets[0] for k, group in groups.items() if len(group.targets) == 1}
        self.groups = {k: of for k, of in groups.items() if not alone.get(k, "").endswith("Attention")}
        """The settings of linears by the name of their group; vLLM passes over those of attention alone."""
        self._schemes = {target: group for group in self.groups.values() for target in group.targets}
        self.layers: dict[str, list[str]] = {}
        """Name of a layer in vLLM -> the modules that it is made of."""
        modules = dict.fromkeys(name.rpartition(".")[0] for name in tensors)
        for module in modules:
            self.layers.setdefault(layer_of(module), []).append(module)
        names = dict.fromkeys([*modules, *self.layers, *CLASSES, *CLASSES.values(), LINEAR, ROUTED])
        patterns = self._schemes, self._config.ignore or (), of_transforms
        self._targets, self._ignored, _ = (Patterns(of, names, owner) for of in patterns)
        for parts in self.layers.values():
            parts.sort(key=lambda part: ORDER.get(part.rpartition(".")[2], 0))

    def format_of(self, scheme: QuantizationScheme) -> str:
        return str(getattr(scheme.format, "value", scheme.format) or self._config.format)

    def of(self, module: str) -> QuantizationScheme | None:
        """Return the scheme of a linear's layer in vLLM, or None; raise FlexQuantError if it has two."""
        layer = layer_of(module)
        parts = self.layers.get(layer, ())
        if len(parts) < 2 or EXPERTS.match(module):
            return self.by_itself(module)
        ignored = {part: self._ignored.first(part) is not None for part in parts}
        if self._ignored.first(layer) or all(ignored.values()):
            return None
        if any(ignored.values()):
            found = [next(part for part in parts if ignored[part] is is_left) for is_left in (False, True)]
            raise unlike(self._owner, *found)
        named = [self._targets.first(part) for part in parts]
        return self._scheme(layer, self._targets.first(layer) or (named[0] if all(named) else None))

    def by_itself(self, module: str) -> QuantizationScheme | None:
        """Return the scheme that a linear would have if vLLM did not make one layer of it and others."""
        if self._ignored.first(module):
            return None
        return self._scheme(module, self._targets.first(module))

    def _scheme(self, name: str, target: str | None) -> QuantizationScheme | None:
        if target is None:  # the first that fits the name of vLLM's class
            kind = ROUTED if EXPERTS.match(name) else CLASSES.get(name.rpartition(".")[2], LINEAR)
            fits = self._targets.fitting(kind)
            fits += [t for t in self._schemes if not t.startswith(PREFIX) and t.lower() in kind.lower()]
            target = next((t for t in self._schemes if t in fits), LINEAR if kind == ROUTED else None)
        return None if target is None else self._schemes.get(target)


def unlike(owner: str, one: str, other: str) -> FlexQuantError:
    """Return the error for two linears of one layer that are quantised in different ways."""
    problem = f"{owner} has {one} and {other} quantised in different ways, and vLLM makes one layer of both"
    return FlexQuantError(f"{problem}; quantise both alike, or neither")


def _parse(section: JsonObject, owner: str) -> tuple[QuantizationConfig, list[str]]:
    """Return a section as compressed-tensors reads it, and the patterns of its transforms."""
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.transform import TransformConfig

    try:
        if section.get("ignore", ()) is None:
            raise ValueError("ignore is null")
        config = QuantizationConfig.model_validate({"config_groups": {}, **section})
        transforms = TransformConfig.model_validate(section.get("transform_config") or {"config_groups": {}})
    except (ValueError, TypeError, KeyError, NotImplementedError, OverflowError) as e:
        problem = f"{owner} has a quantization_config that is not understood ({said_by(e)})"
        advice = "quantise the model again with a supported release of llmcompressor"
        raise FlexQuantError(f"{problem}; {advice}") from e
    applied = chain.from_iterable(scheme.apply for scheme in transforms.config_groups.values())
    return config, [pattern for args in applied for pattern in (*args.targets, *args.ignore)]


def is_readable(args: QuantizationArgs, form: str) -> bool:
    """Whether weights stored in a format are INT or FP8 of a kind whose parameters' shapes are known."""
    is_known = form in READABLE_FORMATS and args.strategy in READABLE_STRATEGIES
    return is_known and args.num_bits in READABLE_BITS[args.type]


def stored_shape(weight: TensorRef, part: Callable[[str], TensorRef | None]) -> tuple[int, ...]:
    """Return (out_features, in_features) of a Linear's stored matrix; ``part`` as for `shape_problem`."""
    if weight.name.endswith(PACKED_SUFFIX):
        return unpacked_shape(weight, part("weight_shape"))
    return weight.shape


def shape_problem(args: QuantizationArgs, weight: TensorRef, part: Callable[[str], TensorRef | None]) -> str:
    """Return how the parameters of a Linear in INT2, 4 or 8 or FP8 do not fit its scheme; empty if they do.

    ``part`` returns a parameter beside the stored matrix ``weight`` by its last name, e.g. ``weight_scale``.
    """
    rows, columns = shape = stored_shape(weight, part)
    if part("weight_g_idx") is not None:
        return f"has {IN_ANOTHER_ORDER}"
    packed = weight.name.endswith(PACKED_SUFFIX)
    dtype = "I32" if packed else "I8" if args.type == "int" else "F8_E4M3"
    if weight.dtype != dtype:
        return f"has its weight as {weight.dtype}, expected {dtype}"
    expected = (rows, math.ceil(columns * args.num_bits / WORD_BITS)) if packed else shape
    if weight.shape != expected:
        return f"has a weight of shape {list(weight.shape)}, expected {list(expected)}"
    if args.strategy == "block" and min(args.block_structure) < 1:
        return f"has blocks of {list(args.block_structure)}, expected numbers from 1"
    if args.strategy == "group" and columns % args.group_size:
        return f"has groups of {args.group_size} inputs, which do not divide its {columns}"
    if part("weight_scale") is None:
        return "has no weight_scale"
    zero_point, of_scale = part("weight_zero_point"), _scale_shapes(args, rows, columns)
    of_zero_point = of_scale
    if zero_point is not None and zero_point.dtype == "I32":  # packed along the rows
        of_zero_point = [(math.ceil(rows * args.num_bits / WORD_BITS), of_scale[0][-1])]
    of_bias: list[tuple[int, ...]] = [(rows,)]
    for name, shapes in ("weight_scale", of_scale), ("weight_zero_point", of_zero_point), ("bias", of_bias):
        if (ref := part(name)) is not None and ref.shape not in shapes:
            listed = " or ".join(str(list(shape)) for shape in shapes)
            return f"has a {name} of shape {list(ref.shape)}, expected {listed}"
    if zero_point is None and args.type == "int" and not args.symmetric:
        return "is asymmetric but has no weight_zero_point"
    return ""


def _scale_shapes(args: QuantizationArgs, rows: int, columns: int) -> list[tuple[int, ...]]:
    if args.strategy == "tensor":
        return [(1,), ()]
    if args.strategy == "block":
        height, width = args.block_structure
        return [(math.ceil(rows / height), math.ceil(columns / width))]
    return [(rows, columns // args.group_size if args.strategy == "group" else 1)]


def is_w8a8(scheme: QuantizationScheme) -> bool:
    """Whether weights can be nested: symmetric INT8 by channel, with dynamic INT8 activations by token."""
    w, a = scheme.weights, scheme.input_activations
    if w is None or a is None or any((x.type, x.num_bits) != ("int", 8) for x in (w, a)):
        return False
    return (w.symmetric, w.strategy, a.strategy, a.dynamic) == (True, "channel", "token", True)


def is_w4a16(scheme: QuantizationScheme) -> bool:
    """Whether INT8 weights can be nested in such weights: INT4, with 16-bit activations."""
    w = scheme.weights
    return w is not None and (w.type, w.num_bits) == ("int", 4) and scheme.input_activations is None
