# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read what the cost model needs of a merged checkpoint (linears, KV cache, bytes), without its weights."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from compressed_tensors.quantization import QuantizationArgs

from flexquant.checkpoint.contents import report_checkpoint
from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
from flexquant.checkpoint.model_config import JsonObject, count_layers, text_config
from flexquant.checkpoint.module_names import decoder_layer, fused_name
from flexquant.checkpoint.safetensors_io import TensorRef
from flexquant.checkpoint.schemes import LinearSchemes, logical_shapes
from flexquant.errors import FlexQuantError
from flexquant.policy.rules import Derivation

KV_BYTES = 2
"""Bytes of one number in the KV cache: 16 bits, vLLM's default."""
EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
SCHEMES = {("int", 8, "int", 8): "w8a8", ("float", 8, "float", 8): "fp8", ("int", 4, "int", 8): "w4a8"}
"""(Type and bits of the weights, type and bits of the activations) -> scheme."""


@dataclass(frozen=True)
class ModelShape:
    """One device's share of a merged checkpoint."""

    num_layers: int
    kv_bytes_per_token: float
    attention_flops: float
    """Operations for one query token and one key token in all layers: scores and weighted sum."""
    linears: Mapping[str, Mapping[Linear, int]]
    """Variant -> linear of the decoder layers -> calls in a pass."""
    head: Linear
    """lm_head."""
    own_bytes: Mapping[str, float]
    """Variant -> bytes of the tensors that no other variant has."""
    shared_bytes: float
    tensor_parallel_size: int
    has_sliding_window: bool
    """Whether some layers attend to the latest tokens only; they are counted as full attention."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Variant that computes its weights in each pass -> variant whose weights it reads."""

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(self.linears)

    @property
    def resident_bytes(self) -> float:
        """Bytes of all variants' weights; shared tensors count once."""
        return self.bytes_of(self.variants)

    def bytes_of(self, variants: Iterable[str]) -> float:
        """Return the bytes of the weights if only these variants, and their sources, are loaded."""
        loaded = {name for variant in variants for name in (variant, self.sources.get(variant, variant))}
        return self.shared_bytes + sum(self.own_bytes[variant] for variant in loaded)


def read_model_shape(
    folder: str | Path, tensor_parallel_size: int = 1, derived: Mapping[str, Derivation] | None = None
) -> ModelShape:
    """Read config.json and the safetensors headers of the merged checkpoint in ``folder``.

    Arguments and further errors are those of :func:`shape_of`. Raises FlexQuantError for a folder that is no
    merged checkpoint.
    """
    checkpoint = MergedCheckpoint.open(folder, published=True)
    readers = {
        name: LinearReader(
            checkpoint.variant_tensors(name), variant.quantization_config, f"{folder}, variant {name}"
        )
        for name, variant in checkpoint.merged.variants.items()
    }
    report = report_checkpoint(checkpoint.merged, count_layers(checkpoint.config), checkpoint.tensors)
    own_bytes = {name: found.own_bytes for name, found in report.variants.items()}
    config, shared = checkpoint.config, report.shared_bytes
    return shape_of(config, readers, own_bytes, shared, tensor_parallel_size, derived or {}, folder)


def shape_of(
    config: JsonObject,
    readers: Mapping[str, LinearReader],
    own_bytes: Mapping[str, float],
    shared_bytes: float,
    tensor_parallel_size: int,
    derived: Mapping[str, Derivation],
    source: str | Path,
) -> ModelShape:
    """Return one device's share of a model; ``readers`` and ``own_bytes`` are by variant.

    ``derived`` are variants that a policy derives from these. ``source`` names the model in messages. Sliding
    windows are counted as full attention. Raises FlexQuantError for an unknown scheme, latent attention,
    attention heads that ``tensor_parallel_size`` does not divide, and a derivation without INT4 weights.
    """
    config = text_config(config)
    hidden, heads, vocabulary = (
        _integer(config, key, source) for key in ("hidden_size", "num_attention_heads", "vocab_size")
    )
    if heads % tensor_parallel_size:
        raise FlexQuantError(
            f"{source} has {heads} attention heads, which {tensor_parallel_size} devices cannot share "
            "evenly; give a --tensor-parallel-size that divides them"
        )
    if config.get("kv_lora_rank"):
        raise FlexQuantError(
            f"{source} has multi-head latent attention, whose passes cannot be predicted; measure them with "
            "'flexquant tune'"
        )
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = max(1, (config.get("num_key_value_heads") or heads) / tensor_parallel_size)
    num_layers = count_layers(config)
    active_experts = config.get("num_experts_per_tok") or 1
    linears: dict[str, Mapping[Linear, int]] = {
        name: {
            linear.share(tensor_parallel_size): count
            for linear, count in reader.decoder_linears(active_experts).items()
        }
        for name, reader in readers.items()
    }
    model = ModelShape(
        num_layers,
        num_layers * 2 * kv_heads * head_dim * KV_BYTES,
        num_layers * 4 * heads * head_dim / tensor_parallel_size,
        linears,
        next(iter(readers.values())).head(vocabulary, hidden).share(tensor_parallel_size),
        {name: nbytes / tensor_parallel_size for name, nbytes in own_bytes.items()},
        shared_bytes / tensor_parallel_size,
        tensor_parallel_size,
        _has_sliding_window(config),
    )
    for name, derivation in derived.items():
        model = _with_derived(model, name, derivation, source)
    return model


def _with_derived(model: ModelShape, name: str, derivation: Derivation, source: str | Path) -> ModelShape:
    """Return the model with a variant that is derived from INT4 weights.

    W4A8 has a second copy of them. One copy computes INT8 weights from them in each pass, into memory for the
    largest linear, and leaves experts as they are.
    """
    stored = {} if name in model.linears else model.linears.get(derivation.source, {})
    if all(linear.scheme != "w4a16" for linear in stored):
        raise FlexQuantError(
            f"{source} has the variants {', '.join(model.linears)}: there is no '{derivation.source}' with "
            f"INT4 weights to derive '{name}' from, or '{name}' is there already; take it out of the policy"
        )
    linears: Counter[Linear] = Counter()
    for linear, count in stored.items():
        linears[linear.derived(derivation)] += count
    own, sources = {name: model.own_bytes[derivation.source]}, {}
    if derivation.is_one_copy:
        own[name] = max(linear.weight_bytes for linear in linears if linear.source_bytes)
        sources[name] = derivation.source
    own, sources = {**model.own_bytes, **own}, {**model.sources, **sources}
    return replace(model, linears={**model.linears, name: linears}, own_bytes=own, sources=sources)


def _has_sliding_window(config: JsonObject) -> bool:
    """Return as transformers does: by ``layer_types``, else by ``sliding_window`` unless it is off."""
    if layer_types := config.get("layer_types"):
        return "sliding_attention" in layer_types
    return bool(config.get("sliding_window")) and config.get("use_sliding_window") is not False


def _integer(config: JsonObject, key: str, folder: str | Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise FlexQuantError(
            f"{Path(folder) / 'config.json'} has {key} {value!r}, expected a whole number from 1; merge again"
        )
    return value


@dataclass(frozen=True)
class Linear:
    """One call of a linear, or of the equal linears of all ``experts`` among which a router chooses."""

    outputs: int
    inputs: int
    weight_bytes: float
    """Stored bytes of one expert's weight, scales included."""
    scheme: str
    """A key of :data:`flexquant.planning.device.RATES`."""
    experts: int = 1
    active_experts: int = 1
    """Experts that each token goes through."""
    source_bytes: float = 0
    """Stored bytes of the INT4 weight from which each pass computes this one; 0 for one that is stored."""

    def share(self, devices: int) -> Linear:
        """Return one device's part under tensor parallelism, as if the outputs were always split."""
        return replace(
            self, outputs=max(1, self.outputs // devices), weight_bytes=self.weight_bytes / devices
        )

    def derived(self, derivation: Derivation) -> Linear:
        """Return the linear that a derivation makes of this one; it is the same unless this one is W4A16."""
        if self.scheme != "w4a16" or (derivation.is_one_copy and self.experts > 1):
            return self
        if not derivation.is_one_copy:
            return replace(self, scheme="w4a8")
        int8 = float(self.outputs * self.inputs)
        return replace(self, scheme="w8a8", weight_bytes=int8, source_bytes=self.weight_bytes)


class LinearReader:
    """Reads the linears from one variant's ``tensors`` (by original key) and its ``quantization_config``.

    ``source`` names the variant in messages.
    """

    def __init__(
        self, tensors: Mapping[str, TensorRef], quantization_config: JsonObject, source: str
    ) -> None:
        self._source = source
        self._schemes = LinearSchemes(quantization_config, source)
        self._shapes = logical_shapes(tensors)
        self._weights: dict[str, list[int]] = defaultdict(list)
        for key, ref in tensors.items():
            module, _, parameter = key.rpartition(".")
            if parameter.startswith(("weight", "qweight", "qzeros", "scales")):
                self._weights[module].append(ref.nbytes)

    def decoder_linears(self, active_experts: int) -> Counter[Linear]:
        """Return how often each linear occurs in the decoder layers."""
        modules = [m for m in self._weights if decoder_layer(m) and len(self._shape(m)) == 2]
        if not modules:
            raise FlexQuantError(
                f"{self._source} has no linear weights in decoder layers, which the cost model is about; "
                "give a merged checkpoint of a decoder-only language model"
            )
        calls: dict[str, Linear] = {}  # keyed by name after fusing, the expert's number included
        for module in modules:
            name, linear = fused_name(module), self._read(module)
            if (part := calls.get(name)) is not None:
                linear = replace(
                    linear,
                    outputs=part.outputs + linear.outputs,
                    weight_bytes=part.weight_bytes + linear.weight_bytes,
                )
            calls[name] = linear
        experts = Counter(EXPERT.sub("", name) for name in calls)
        distinct = {EXPERT.sub("", name): (name, linear) for name, linear in calls.items()}
        return Counter(
            replace(linear, experts=experts[stem], active_experts=min(active_experts, experts[stem]))
            if EXPERT.search(name)
            else linear
            for stem, (name, linear) in distinct.items()
        )

    def head(self, vocabulary: int, hidden: int) -> Linear:
        """Return lm_head; a tied one reads the embedding, in 16 bits."""
        if "lm_head" in self._weights:
            return self._read("lm_head")
        return Linear(vocabulary, hidden, 2 * vocabulary * hidden, "bf16")

    def _shape(self, module: str) -> tuple[int, ...]:
        return self._shapes.get(f"{module}.weight", ())

    def _read(self, module: str) -> Linear:
        outputs, inputs = self._shape(module)
        is_quantised = len(self._weights[module]) > 1
        scheme = self._scheme(module) if is_quantised else "bf16"
        return Linear(outputs, inputs, sum(self._weights[module]), scheme)

    def _scheme(self, module: str) -> str:
        group = self._schemes.of(module)
        if group is None or group.weights is None:
            raise FlexQuantError(
                f"{self._source}: '{module}' is stored quantised, but no config group quantises it; quantise "
                "the model again"
            )
        weights, activations = group.weights, group.input_activations
        if activations is None or activations.num_bits == 16:
            return "w4a16" if weights.num_bits <= 4 else "w8a16" if weights.num_bits <= 8 else "bf16"
        kinds = (_kind(weights), weights.num_bits, _kind(activations), activations.num_bits)
        if (scheme := SCHEMES.get(kinds)) is None:
            raise FlexQuantError(
                f"{self._source}: '{module}' has {kinds[1]}-bit {kinds[0]} weights and {kinds[3]}-bit "
                f"{kinds[2]} activations, which the cost model does not know; it knows weight-only schemes, "
                f"{', '.join(SCHEMES.values())}"
            )
        return scheme


def _kind(arguments: QuantizationArgs) -> str:
    return str(getattr(arguments.type, "value", arguments.type))
