# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read the linears of a variant (sizes, bytes, schemes, experts) from the headers of its tensors."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from compressed_tensors.quantization import QuantizationArgs

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.module_names import decoder_layer, fused_name
from flexquant.checkpoint.safetensors_io import TensorRef
from flexquant.checkpoint.schemes import LinearSchemes, logical_shapes
from flexquant.errors import FlexQuantError
from flexquant.planning.device import MARLIN
from flexquant.policy.rules import Derivation

INT4 = ("w4a16", MARLIN)
MARLIN_TILES = ((64, 128), (128, 64))
"""Outputs and inputs of which the INT4 linears of one copy need multiples on a GPU."""
ROW_PARALLEL = frozenset(
    ("o_proj", "out_proj", "wo", "dense", "fc_out", "c_proj", "down_proj", "fc2", "w2", "dense_4h_to_h")
    + ("output_linear", "x_proj", "linear_right")
)
"""Last parts of the names of linears whose inputs vLLM splits among ranks; of others, the outputs."""
REPLICATED = frozenset(
    ("gate", "router", "shared_expert_gate", "fc1_latent_proj", "fc2_latent_proj", "g_a_proj", "q_a_proj")
    + ("kv_a_proj_with_mqa", "per_layer_input_gate", "per_layer_projection", "prediction_coefs")
    + ("correction_coefs",)
)
"""Last parts of the names of linears that every rank has whole."""
QKV = frozenset(("qkv_proj", "query_key_value", "c_attn", "Wqkv", "wqkv"))
"""Last parts of the names of linears of queries, keys and values; no rank has less than a KV head of them."""
EXPERT = re.compile(r"(?<=\.experts)\.\d+(?=\.)")
SCHEMES = {("int", 8, "int", 8): "w8a8", ("float", 8, "float", 8): "fp8", ("int", 4, "int", 8): "w4a8"}
"""(Type and bits of the weights, type and bits of the activations) -> scheme."""


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

    @property
    def kernel(self) -> str:
        """Scheme of the kernel that runs it: vLLM has Marlin run experts in INT4."""
        return MARLIN if self.experts > 1 and self.scheme == "w4a16" else self.scheme

    @property
    def fills_marlin(self) -> bool:
        return any(
            self.outputs % outputs == 0 and self.inputs % inputs == 0 for outputs, inputs in MARLIN_TILES
        )

    def with_outputs(self, outputs: int) -> Linear:
        return replace(self, outputs=outputs, weight_bytes=self.weight_bytes * outputs / self.outputs)

    def share(self, name: str, devices: int) -> Linear:
        """Return one device's part, as vLLM splits the linear ``name`` under tensor parallelism.

        Raises FlexQuantError for a size that the devices cannot share evenly.
        """
        leaf = name.rpartition(".")[2]
        if leaf in REPLICATED:
            return self
        by_inputs = leaf in ROW_PARALLEL
        size = self.inputs if by_inputs else self.outputs
        if size % devices:
            raise FlexQuantError(
                f"the {size} {'inputs' if by_inputs else 'outputs'} of '{name}' cannot be shared evenly by "
                f"{devices} devices; give a --tensor-parallel-size that divides them"
            )
        if not by_inputs:
            return self.with_outputs(size // devices)
        return replace(self, inputs=size // devices, weight_bytes=self.weight_bytes / devices)

    def derived(self, derivation: Derivation) -> Linear:
        """Return the linear that a derivation makes of this one; it is the same unless this one is W4A16."""
        if self.scheme not in INT4 or (derivation.is_one_copy and self.experts > 1):
            return self
        if not derivation.is_one_copy:
            return replace(self, scheme="w4a8")
        int8 = float(self.outputs * self.inputs)
        return replace(self, scheme="w8a8", weight_bytes=int8, source_bytes=self.weight_bytes)


def plain_linear(outputs: int, inputs: int) -> Linear:
    """Return a linear in 16 bits."""
    return Linear(outputs, inputs, 2 * outputs * inputs, "bf16")


class LinearReader:
    """Reads the linears from one variant's ``tensors`` (by original key) and its ``quantization_config``.

    ``source`` names the variant in messages.
    """

    def __init__(
        self, tensors: Mapping[str, TensorRef], quantization_config: JsonObject, source: str
    ) -> None:
        self._source = source
        self._schemes = LinearSchemes(quantization_config, source, tensors)
        self._shapes = logical_shapes(tensors)
        self._weights: dict[str, list[int]] = defaultdict(list)
        for key, ref in tensors.items():
            module, _, parameter = key.rpartition(".")
            if parameter.startswith(("weight", "qweight", "qzeros", "scales")):
                self._weights[module].append(ref.nbytes)

    def decoder_linears(self) -> dict[str, Linear]:
        """Return the linears of the decoder layers by name, as vLLM fuses them; equal experts are one."""
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
        distinct = {EXPERT.sub("", name): linear for name, linear in calls.items()}
        return {name: replace(linear, experts=experts[name]) for name, linear in distinct.items()}

    def head(self, vocabulary: int, hidden: int) -> Linear:
        """Return lm_head; a tied one reads the embedding, in 16 bits."""
        if "lm_head" in self._weights:
            return self._read("lm_head")
        return plain_linear(vocabulary, hidden)

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
