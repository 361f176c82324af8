# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Nest W8A8 variants in an INT4 variant: store 4 bits for each INT8 weight, its difference to a prediction.

The INT4 weight, times one factor a row and one a column, predicts the INT8 weight. Where 4 bits miss it by
most, the INT8 weight is stored as an exception. Linears that vLLM fuses, whose inputs are the same, have one
column of factors. Factors are fitted when a tensor of a layer is first read; weights are read a block at a
time.
"""

import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor

from flexquant.checkpoint.draft_heads import drafts
from flexquant.checkpoint.loadable import PACKED, describe_linear
from flexquant.checkpoint.merged_config import SHARED, SHARED_PREFIX
from flexquant.checkpoint.module_names import EXPERTS, decoder_layer, fused_name
from flexquant.checkpoint.nested import (
    Int4Weight,
    NestedWeight,
    blocks,
    nested_parts,
    nested_weights,
    predict,
    with_weights,
)
from flexquant.checkpoint.safetensors_io import CASTS, ComputedTensor, TensorRef, load_tensor
from flexquant.checkpoint.schemes import (
    COLUMN,
    FLOAT_DTYPES,
    ROW,
    LinearSchemes,
    is_w4a16,
    is_w8a8,
    rotates_in_passes,
)
from flexquant.errors import FlexQuantError
from flexquant.merge.formats import Source, stated_dtype
from flexquant.merge.merge_plan import MergePlan
from flexquant.merge.nested_fit import (
    WIDTHS,
    Misses,
    distances,
    encode,
    fit_block,
    fit_column,
    is_widened,
    widened,
)
from flexquant.merge.packed_formats import of_rows

Scheme = tuple[QuantizationScheme, str]
"""How a linear is quantised, and the format in which it is stored."""
Nested = Literal["near", "exact"]
"""What a merge does with integers that are out of reach: takes the nearest, or refuses the variants."""
MAX_ADDED_NOISE = 8.0
"""Largest squared error of a linear's misses, over that of rounding to INT8; rotated variants have 10,000."""
MAX_INPUTS = 1 << 16
SCALE = "weight_scale"
"""Last part of the name of the INT8 weights' scales."""
TWO_COPIES = "merge without --nested, which stores the weights of both"


@dataclass(frozen=True)
class Factors:
    """The factors of a layer, and what is missed with them."""

    rows: dict[str, Tensor]
    """Module -> float32 [outputs, 1]."""
    column: Tensor
    """float32 [inputs]."""
    scales: dict[str, Tensor]
    """Module -> scales of the INT8 weights [outputs, 1], in their dtype."""
    missed: dict[str, Misses]


class Pair(NamedTuple):
    weight8: TensorRef
    scale8: TensorRef
    int4: Int4Weight


class NestedLayer:
    """The linears that vLLM makes one layer of, by module."""

    def __init__(self, weights: Mapping[str, Pair], variant: str, nested: Nested) -> None:
        self._weights, self._variant, self._nested = weights, variant, nested
        self._lock = threading.Lock()
        self._fitted: Factors | None = None

    def factors(self) -> Factors:
        """Return the layer's factors, fitted once; raise FlexQuantError if weights are missed too far."""
        with self._lock:
            found = self._fitted = self._fitted or self._fit()
        for module, missed in found.missed.items():
            if self._nested == "exact" and missed.changed:
                counts = f"{missed.changed} of {missed.weights} integers of '{module}' are out of reach"
                raise self._refused(f"{counts}, and none may change with --nested-exact: take --nested")
            if missed.added_noise > MAX_ADDED_NOISE:
                share = f"{100 * missed.changed / missed.weights:.3g} % of the integers of '{module}' change"
                noise = f"its misses add {missed.added_noise:.2f} times INT8's own rounding noise"
                advice = "quantise both from one model, INT4 in groups of 32 with zero points"
                raise self._refused(f"{share}, and {noise}, allowed is {MAX_ADDED_NOISE:g}: {advice}")
        return found

    def _refused(self, problem: str) -> FlexQuantError:
        return FlexQuantError(f"variant '{self._variant}' cannot be nested: {problem}, or {TWO_COPIES}")

    def stored(self) -> dict[str, TensorRef]:
        """Return what takes the place of INT8 weights and scales, by original key; reading computes it."""
        return {ref.name: ref for module in self._weights for ref in self._stored(module)}

    def _stored(self, module: str) -> list[TensorRef]:
        weight8, scale8, int4 = self._weights[module]

        def encoded(part: str, rows: Sequence[range] | None) -> Tensor:
            factors, found = self.factors(), []
            for block in blocks(int4.shape, rows):
                row, wide = (x[module][block.start : block.stop] for x in (factors.rows, factors.scales))
                predicted = predict(*int4.read(block), row, factors.column)
                wanted = widened(load_tensor(weight8, [block]), load_tensor(scale8, [block]), wide)
                found.append(encode(wanted, predicted)[0][part])
            return torch.cat(found)

        def of_layer(find: Callable[[Factors], Tensor], rows: Sequence[range] | None) -> Tensor:
            return of_rows(find(self.factors()), rows)

        whole: dict[str, Callable[[Factors], Tensor]] = {
            ROW: lambda factors: factors.rows[module],
            COLUMN: lambda factors: factors.column,
            SCALE: lambda factors: factors.scales[module],
        }
        kinds = {**nested_parts(*int4.shape), SCALE: (scale8.dtype, scale8.shape)}

        def read(part: str) -> Callable[[Sequence[range] | None], Tensor]:
            return partial(of_layer, whole[part]) if part in whole else partial(encoded, part)

        return [
            ComputedTensor(f"{module}.{part}", *kind, weight8.file, 0, read(part))
            for part, kind in kinds.items()
        ]

    def _fit(self) -> Factors:
        def read() -> Iterator[tuple[Tensor, Tensor]]:
            for weight8, _, int4 in self._weights.values():
                for part in blocks(int4.shape):
                    values, scale = int4.read(part)
                    yield load_tensor(weight8, [part]).double(), (values * scale).flatten(1).double()

        column = fit_column(read, next(iter(self._weights.values())).int4.shape[1])
        rows, scales, missed = {}, {}, {}
        widths = WIDTHS[:1] if self._nested == "exact" else WIDTHS
        for module, (weight8, scale8, int4) in self._weights.items():
            found = []
            for block in blocks(int4.shape):
                of_block = load_tensor(weight8, [block]), load_tensor(scale8, [block]), *int4.read(block)
                found.append(fit_block(*of_block, column, widths))
            rows[module] = torch.cat([part.row for part in found])
            scales[module] = torch.cat([part.scale for part in found])
            missed[module] = Misses.total(part.missed for part in found)
        return Factors(rows, column, scales, missed)


def is_nearest(stored: NestedWeight, scale: TensorRef, weight8: TensorRef, scale8: TensorRef) -> bool:
    """Whether what is stored is what a merge writes for an INT8 weight, by the stored factors and scales."""
    if (weight8.dtype, weight8.shape) != ("I8", stored.int4.shape):
        return False
    squared = 0.0
    for block in blocks(stored.int4.shape):
        weight, given, wide = (load_tensor(ref, [block]) for ref in (weight8, scale8, scale))
        if not is_widened(given, wide):
            return False
        found, served = encode(widened(weight, given, wide), stored.predicted(block))
        if not all(torch.equal(load_tensor(stored.stored[part], [block]), x) for part, x in found.items()):
            return False
        squared += float(distances(served, wide, weight, given).square().sum())
    return Misses(math.prod(weight8.shape), 0, squared).added_noise <= MAX_ADDED_NOISE


@dataclass(frozen=True)
class NestedVariant:
    """A variant that is stored as differences to another."""

    source: str
    layers: Sequence[NestedLayer]

    def missed(self) -> Misses:
        """Return what is missed of all its linears; layers are fitted if need be."""
        return Misses.total(missed for layer in self.layers for missed in layer.factors().missed.values())


def nest(plan: MergePlan, nested: Nested) -> tuple[MergePlan, dict[str, NestedVariant]]:
    """Return a plan with INT8 weights as differences to INT4, and what is nested; raise if none can be."""
    sources, groups = {s.name: s for s in plan.sources}, {name: {**of} for name, of in plan.groups.items()}
    schemes = {name: _schemes(source, plan.num_layers) for name, source in sources.items()}
    without_forms = {name: [scheme for scheme, _ in of.values()] for name, of in schemes.items()}
    eights, source = find_pair(without_forms)
    stated = stated_dtype(plan.sources[0].config)
    dtypes = [stated] if stated in CASTS else list(CASTS)  # vLLM serves what is in 32 bit in one of these
    variants = {}
    for name in (*eights, source):
        if rotates_in_passes(sources[name].quantization_config):
            eight = name if name in eights else eights[0]
            reason = f"each pass rotates the inputs of linears of '{name}'"
            advice = f"quantise by the recipe 'unrotated', or {TWO_COPIES}"
            raise FlexQuantError(f"'{eight}' cannot be nested in '{source}': {reason}; {advice}")
    for name in eights:
        tensors, by_layer = sources[name].tensors, dict[str, dict[str, Pair]]()
        for module in sorted(schemes[name] | schemes[source]):
            int4 = Int4Weight.of(sources[source].tensors, module)
            problem = _problem(module, schemes[name].get(module), schemes[source].get(module), int4)
            if int4 and not problem and [int4.scale.dtype] != [CASTS[dtype] for dtype in dtypes]:
                one, casts = " or ".join(dtypes), " or ".join(CASTS)
                problem = f"has INT4 scales in {int4.scale.dtype}, and is served in {one}, to which vLLM"
                problem += f" rounds them; merge with --dtype {casts}, which casts them, or"
            scale8 = tensors.get(f"{module}.{SCALE}")
            if int4 and not problem and (scale8 is None or scale8.shape != (int4.shape[0], 1)):
                problem = "has scales of another form in W8A8;"
            if problem or int4 is None:
                named = f"variant '{name}' cannot be nested in '{source}'"
                raise FlexQuantError(f"{named}: '{module}' {problem} {TWO_COPIES}")
            pair = Pair(tensors[f"{module}.weight"], tensors[f"{module}.{SCALE}"], int4)
            by_layer.setdefault(fused_name(module), {})[module] = pair
        layers = [NestedLayer(weights, name, nested) for weights in by_layer.values()]
        stored = {key: ref for layer in layers for key, ref in layer.stored().items()}
        gone = {f"{module}.{part}" for module in schemes[name] for part in ("weight", SCALE)}
        own = {key: ref for key, ref in tensors.items() if key not in gone} | stored
        served = with_weights(own, nested_weights(own, sources[source].tensors))
        sources[name] = replace(sources[name], tensors=served)
        for key in sorted(gone):  # what was shared is now the other variants' alone
            groups[name].pop(f"{name}.{key}", None)
            if groups.get(SHARED, {}).pop(SHARED_PREFIX + key, None) is not None:
                for other in (other for other in sources if other not in eights):
                    groups.setdefault(other, {})[f"{other}.{key}"] = sources[other].tensors[key]
        groups[name] |= {f"{name}.{key}": ref for key, ref in stored.items()}
        variants[name] = NestedVariant(source, layers)
    left = {name: group for name, group in groups.items() if group}
    return replace(plan, sources=tuple(sources.values()), groups=left), variants


def find_pair(schemes: Mapping[str, Collection[QuantizationScheme]]) -> tuple[list[str], str]:
    """Return the names of the W8A8 variants and of the INT4 variant; raise FlexQuantError without a pair."""
    eights = [name for name, found in schemes.items() if any(map(is_w8a8, found))]
    fours = [name for name, found in schemes.items() if any(map(is_w4a16, found))]
    if len(fours) > 1:
        problem = f"{' and '.join(fours)} have INT4 weights and 16-bit activations"
        advice = f"which? Leave the others out, or {TWO_COPIES}"
        raise FlexQuantError(f"{problem}, and INT8 weights are nested in those of one variant; {advice}")
    if not eights or not fours:
        eight = "a variant in W8A8 (INT8 weights by channel, dynamic INT8 activations by token)"
        two = f"{eight} and one with INT4 weights and 16-bit activations"
        advice = "add what is missing, or merge without --nested"
        raise FlexQuantError(f"nothing of {', '.join(schemes)} can be nested: that takes {two}; {advice}")
    return eights, fours[0]


def _schemes(source: Source, num_layers: int) -> dict[str, Scheme]:
    """Return how the quantised linears of the ``num_layers`` decoder layers are quantised, by module."""
    schemes = LinearSchemes(source.quantization_config, source.owner, source.tensors)
    found = {}
    for name, ref in source.tensors.items():
        module, _, last = name.rpartition(".")
        is_quantised = last == "weight_packed" or (last == "weight" and ref.dtype not in FLOAT_DTYPES)
        in_layer = decoder_layer(name) and not drafts(name, source.architecture, num_layers)
        if is_quantised and in_layer and (scheme := schemes.of(module)):
            found[module] = scheme, schemes.format_of(scheme)
    return found


def _problem(module: str, eight: Scheme | None, four: Scheme | None, int4: Int4Weight | None) -> str:
    """Return why a linear cannot be nested; empty if it can."""
    if EXPERTS.match(module):
        return "is one of a mixture's experts;"
    pair = eight is not None and four is not None and is_w8a8(eight[0]) and is_w4a16(four[0])
    if eight is None or four is None or not pair or (eight[1], four[1]) != ("int-quantized", PACKED):
        said = ["16 bit" if scheme is None else describe_linear(*scheme) for scheme in (eight, four)]
        return f"has to be in W8A8 and in W4A16, but is {' in the one, and in the other '.join(said)};"
    if int4 is None:
        return "has an INT4 weight of another form;"
    if (inputs := int4.shape[1]) > MAX_INPUTS:
        return f"has {inputs} inputs, and at most {MAX_INPUTS} can be nested;"
    return "has an odd number of inputs;" if inputs % 2 else ""
