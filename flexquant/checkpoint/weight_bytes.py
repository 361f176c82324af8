# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Count the bytes of a merged checkpoint's files, and describe what it holds (memory: weight_memory.py)."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType

from flexquant.checkpoint.merged_config import SHARED, SHARED_PREFIX, MergedConfig, StoredVariant
from flexquant.checkpoint.model_config import JsonObject, QuantizedNumbers
from flexquant.checkpoint.module_names import EMBEDDINGS, EXPERTS, HEAD, by_range, is_in, layer_number
from flexquant.checkpoint.safetensors_io import TensorRef, Tensors, total_bytes
from flexquant.checkpoint.schemes import DIFFERENCE, FLOAT_DTYPES, logical_shapes, rotates_in_passes
from flexquant.documents.results import table_lines

NOTHING: Mapping[str, float] = MappingProxyType({})
LEAST_SHARE = 0.05
"""Share of a decode step's bytes from which on an lm_head is worth a sentence."""
BytesByRange = dict[str, dict[str, int]]
"""Variant or SHARED -> range of layers, e.g. ``0-3``, or an empty text for outside of layers -> bytes."""


@dataclass(frozen=True)
class NestedReport:
    """What is stored of the linears of a nested variant, whose INT8 weights are computed from another's."""

    source: str
    own_bits: float
    """Bits a weight, scales and factors included."""
    bits_with_source: float
    """The same with what is stored of the source's linears."""
    changed: float | None
    """Share of the INT8 weights that are not the source checkpoint's; None: not recorded."""
    added_noise: float | None
    """Their squared error over that of rounding to INT8; None: not recorded."""


@dataclass(frozen=True)
class VariantReport:
    scheme: str
    own_bytes: int
    """Bytes stored for this variant alone; serving it also needs the shared bytes."""
    parameters: int
    """Number of parameters as the 16-bit model counts them, without packing and scales."""
    bits_per_parameter: float
    """Own and shared bits, scales included, per parameter."""
    nested: NestedReport | None = None
    """None: its weights are stored."""


@dataclass(frozen=True)
class CheckpointReport:
    base_architecture: str
    num_layers: int
    variants: dict[str, VariantReport]
    shared_bytes: int
    total_bytes: int
    bytes_16bit: int
    """Bytes of the model at 16 bits a parameter."""
    layered_plans: bool
    mixable: list[list[str]]
    policy: JsonObject | None
    """Default policy document; None: the built-in default."""
    kv_compatibility: JsonObject

    def to_json(self) -> JsonObject:
        return asdict(self)

    @property
    def policy_text(self) -> str:
        if self.policy is None:
            return "the built-in default"
        return self.policy.get("description") or "stored in the checkpoint, without a description"


def report_checkpoint(
    merged: MergedConfig,
    num_layers: int,
    tensors: Tensors,
    changed: Mapping[str, float] = NOTHING,
    added_noise: Mapping[str, float] = NOTHING,
) -> CheckpointReport:
    """Report on tensors, by merged key, from headers; ``changed`` and ``added_noise`` are as recorded."""
    parts = _by_reader(merged, tensors)
    shared = parts.pop(SHARED)
    shared_bytes = total_bytes(shared)
    variants = {}
    for name, own in parts.items():
        variant, own_bytes = merged.variants[name], total_bytes(own)
        loaded = _without_copies({**shared, **own}, [variant])
        parameters = sum(math.prod(shape) for shape in logical_shapes(loaded).values())
        bits = 8 * (own_bytes + shared_bytes) / max(1, parameters)
        missed, source = (changed.get(name), added_noise.get(name)), variant.nested_in
        nested = _nested_report(own, source, parts[source], *missed) if source else None
        scheme = describe_scheme(variant.quantization_config)
        variants[name] = VariantReport(scheme, own_bytes, parameters, bits, nested)
    return CheckpointReport(
        base_architecture=merged.base_architecture,
        num_layers=num_layers,
        variants=variants,
        shared_bytes=shared_bytes,
        total_bytes=total_bytes(tensors),
        bytes_16bit=2 * max(v.parameters for v in variants.values()),
        layered_plans=merged.layered_plans,
        mixable=[list(group) for group in merged.mixable_groups],
        policy=merged.policy,
        kv_compatibility=merged.kv_compatibility,
    )


def _nested_report(
    own: Tensors, source: str, of_source: Tensors, changed: float | None, added_noise: float | None
) -> NestedReport:
    modules = {key.removesuffix(DIFFERENCE) for key in own if key.endswith(f".{DIFFERENCE}")}
    weights = sum(2 * own[f"{module}{DIFFERENCE}"].nbytes for module in modules) or 1
    bits = [
        sum(8 * ref.nbytes for key, ref in part.items() if f"{key.rpartition('.')[0]}." in modules) / weights
        for part in (own, of_source)
    ]
    share = None if changed is None else changed / weights
    return NestedReport(source, bits[0], sum(bits), share, added_noise)


def weights_in_layers(tensors: Tensors) -> int:
    """Return how many weights the decoder layers of a variant have, by its ``tensors``' original keys."""
    shapes = logical_shapes(tensors)
    return sum(math.prod(shape) for key, shape in shapes.items() if layer_number(key) is not None)


def bytes_in_use(
    merged: MergedConfig, tensors: Tensors, layers: Mapping[str, Collection[int]], sources: Mapping[str, str]
) -> BytesByRange:
    """Return the stored bytes that a policy loads; ``layers`` are the decoder layers of each variant.

    ``sources`` maps a derived variant to its source, whose bytes it has; in layers where the source is loaded
    too, it has packed linears alone. A nested variant has its source's linears too, unless loaded there.
    """
    parts = _by_reader(merged, tensors)
    found: BytesByRange = {}
    for name, numbers in layers.items():
        stored = sources.get(name, name)
        own = _without_copies(parts[stored], [merged.variants[stored]])
        of_source = layers.get(sources.get(name, ""))
        loaded = {key: ref for key, ref in own.items() if is_in(key, numbers)}
        if of_source is not None:
            apart = {key for key in loaded if _is_packed_linear(key, own) or not is_in(key, of_source)}
            loaded = {key: ref for key, ref in loaded.items() if key in apart}
        sizes = _by_layer(loaded)
        if (outer := merged.variants[stored].nested_in) is not None:
            packed = {key: ref for key, ref in parts[outer].items() if _is_packed_linear(key, parts[outer])}
            missing = {*numbers} - {*layers.get(outer, ())}
            sizes += _by_layer({key: ref for key, ref in packed.items() if layer_number(key) in missing})
        found[name] = by_range(sizes)
    shared = _without_copies(parts[SHARED], [merged.variants[sources.get(name, name)] for name in layers])
    return found | {SHARED: by_range(_by_layer(shared))}


def format_bytes(nbytes: float) -> str:
    """Return e.g. ``12.0 MiB``, in the largest unit with a value of at least 1."""
    for unit in ("bytes", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} bytes" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


def describe_bytes(nbytes: BytesByRange) -> str:
    """Return e.g. ``w8a8 layers 0-3: 12.0 MiB, shared: 54.0 MiB``."""
    parts = []
    for name, of_name in nbytes.items():
        for run, size in of_name.items():
            layers = f" layers {run}" if run else "" if len(of_name) == 1 else " outside layers"
            parts.append(f"{name}{layers}: {format_bytes(size)}")
    return ", ".join(parts)


def format_report(report: CheckpointReport) -> str:
    """Return the report as text for a terminal."""
    parameters = max(v.parameters for v in report.variants.values())
    share = f"{100 * report.total_bytes / max(1, report.bytes_16bit):.0f} % of the model in 16 bits"
    of_16_bit = f"{share} ({format_bytes(report.bytes_16bit)}, {parameters:,} parameters)"
    rows = [["", "bytes", "bits/param", "scheme"]]
    for name, v in report.variants.items():
        name = describe_name(name, v)
        rows.append([name, format_bytes(v.own_bytes), f"{v.bits_per_parameter:.2f}", v.scheme])
    rows.append([SHARED, format_bytes(report.shared_bytes)])
    rows.append(["total", format_bytes(report.total_bytes), "", of_16_bit])
    lines = [
        f"{report.base_architecture}, {report.num_layers} layers, {len(report.variants)} variant(s)",
        *("", *table_lines(rows, numbers=(1, 2)), "", *describe_nested(report)),
        f"default policy: {report.policy_text}",
        f"layers of different variants in one plan: {describe_mixing(report)}",
        f"KV cache: {describe_kv(report.kv_compatibility)}",
    ]
    return "\n".join(lines)


def describe_name(name: str, variant: VariantReport) -> str:
    """Return e.g. ``w8a8 (nested in w4a16)``, or the name alone."""
    return name if variant.nested is None else f"{name} (nested in {variant.nested.source})"


def describe_nested(report: CheckpointReport) -> list[str]:
    """Return a sentence on each nested variant."""
    found = []
    for name, variant in report.variants.items():
        if (nested := variant.nested) is not None:
            missed = nested.changed, nested.added_noise
            share, noise = ("an unrecorded share" if x is None else f"{100 * x:.2g} %" for x in missed)
            bits = f"{nested.own_bits:.2f} bits a weight in its linears, {nested.bits_with_source:.2f}"
            added = f"{share} of its integers changed, which adds {noise} to INT8's own rounding noise"
            found.append(f"{name}: {bits} with {nested.source}'s; {added}")
    return found


def describe_scheme(quantization_config: JsonObject) -> str:
    """Return e.g. ``int4 weights (group 128), 16-bit activations``, one part for each distinct group."""
    groups = quantization_config.get("config_groups") or {"of 16 bit": {}}
    kinds = [(g.get("weights"), g.get("input_activations")) for g in groups.values() if isinstance(g, dict)]
    parts = [f"{_describe(w, 'weights')}, {_describe(a, 'activations')}" for w, a in kinds]
    if rotates_in_passes(quantization_config):
        parts.append("rotated in each pass")
    return "; ".join(dict.fromkeys(parts))


def describe_mixing(report: CheckpointReport) -> str:
    """Return ``yes``, ``no``, or which variants' layers one plan can mix."""
    if report.layered_plans:
        return "yes"
    groups = [", ".join(group) for group in report.mixable if len(group) > 1]
    return f"only of {'; '.join(groups)}" if groups else "no"


def describe_kv(kv_compatibility: JsonObject) -> str:
    """Return one sentence on whether the variants' KV caches are interchangeable."""
    if kv_compatibility["compatible"]:
        return "interchangeable between the variants"
    return f"NOT interchangeable: {kv_compatibility.get('message', 'no reason recorded')}"


def _describe(arguments: QuantizedNumbers | None, what: str) -> str:
    if not arguments:
        return f"16-bit {what}"
    size, strategy = arguments.get("group_size"), str(arguments.get("strategy", "")).replace("_", " ")
    details = [f"group {size}" if size else strategy, "dynamic" if arguments.get("dynamic") else ""]
    if what == "activations" and arguments.get("symmetric") is False:
        details.append("asymmetric")
    extra = f" ({', '.join(filter(None, details))})" if any(details) else ""
    return f"{arguments.get('type', 'int')}{arguments.get('num_bits', '')} {what}{extra}"


def _by_reader(merged: MergedConfig, tensors: Tensors) -> dict[str, dict[str, TensorRef]]:
    """Return variant or SHARED -> the tensors stored for it, by original key."""
    prefixes = {name: variant.prefix for name, variant in merged.variants.items()} | {SHARED: SHARED_PREFIX}
    return {
        name: {key.removeprefix(prefix): ref for key, ref in tensors.items() if key.startswith(prefix)}
        for name, prefix in prefixes.items()
    }


def _without_copies(tensors: Tensors, variants: Iterable[StoredVariant]) -> dict[str, TensorRef]:
    """Leave out an lm_head that is a copy of the embedding and that none of the variants loads."""
    no_head = not any(variant.own_head for variant in variants)
    return {key: ref for key, ref in tensors.items() if not (no_head and HEAD.search(key))}


def _is_packed_linear(key: str, tensors: Tensors) -> bool:
    """Whether a tensor belongs to a linear with packed weights that is not an expert's."""
    return f"{key.rpartition('.')[0]}.weight_packed" in tensors and not EXPERTS.match(key)


def _by_layer(tensors: Tensors) -> Counter[int | None]:
    sizes: Counter[int | None] = Counter()
    for key, ref in tensors.items():
        sizes[layer_number(key)] += ref.nbytes
    return sizes


def head_remark(head: float, layers: float) -> str:
    """Say what INT8 would gain of a step's bytes, ``head`` (in 16 bit) and ``layers``; empty if little."""
    share = head / max(1, head + layers)
    if share <= LEAST_SHARE:
        return ""
    what = f"the lm_head in 16 bit is {share:.0%} of the weights that a decode step reads"
    return f"{what}; with 'head: int8' in the policy a step reads {1 - share / 2:.2f} of these bytes"


def stored_head_remark(tensors: Mapping[str, TensorRef]) -> str:
    """Return :func:`head_remark` for a variant's ``tensors``, by original key; empty for experts."""
    if any(map(EXPERTS.match, tensors)):
        return ""
    ends = tuple(f"{name}.weight" for name in EMBEDDINGS)
    embeddings = [ref for name, ref in tensors.items() if name.endswith(ends)]
    heads = [ref for name, ref in tensors.items() if HEAD.search(name)] or embeddings[:1]
    inside = {name: ref for name, ref in tensors.items() if layer_number(name) is not None}
    in_16_bit = all(ref.dtype in FLOAT_DTYPES for ref in heads)
    return head_remark(sum(ref.nbytes for ref in heads) if in_16_bit else 0, total_bytes(inside))
