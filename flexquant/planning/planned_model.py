# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Work out from a ``config.json`` alone what a model would be in each scheme, before it is quantised.

transformers builds the model without memory for its weights. Its linears in decoder layers, experts included,
get the bytes of a scheme; the rest stays in 16 bits. A quantisation in the config is ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import TYPE_CHECKING

from flexquant.checkpoint.built_model import build_config, build_model
from flexquant.checkpoint.folder import check_folder, confined_file, find_model, read_json
from flexquant.checkpoint.merged_config import CONFIG_FILE
from flexquant.checkpoint.model_config import JsonObject, count_layers, reads_more_than_text, text_config
from flexquant.checkpoint.module_names import decoder_layer, fused_name, layer_number
from flexquant.checkpoint.nested import count_exceptions
from flexquant.errors import FlexQuantError, said_by
from flexquant.planning.config_numbers import NUMBER_BYTES, LayerCache, active_experts, read_caches
from flexquant.planning.device import HUMMING, MARLIN, W4A8, W4A8_INT8
from flexquant.policy.schema import Derivation

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GROUP_SIZES = (128, 64, 32)
"""Group sizes of INT4 weights; the first that divides all linears' inputs is taken, as in the recipes."""
INT4 = ("w4a16", W4A8, W4A8_INT8)
INT4_KERNELS = ("w4a16", MARLIN, HUMMING)
LAYOUTS_OF_ONE_COPY = (MARLIN, HUMMING)
"""Kernels of W4A16 whose layout one copy reads."""
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
Built = tuple["PretrainedConfig", list[LayerCache], dict[str, tuple[int, ...]], set[str]]


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
    """Stored bytes of the weight from which each pass computes this one; 0 for one that is stored."""
    difference_bytes: float = 0
    """Stored bytes of the differences, factors and exceptions by which a computed weight is corrected."""
    choice: tuple[str, ...] = ()
    """Schemes of the kernels from which the fastest is chosen; empty: all of its scheme."""

    @property
    def kernels(self) -> tuple[str, ...]:
        """Schemes of the kernels from which the fastest is chosen: vLLM has Marlin run experts in INT4."""
        if self.scheme != "w4a16":
            return (self.scheme,)
        return (MARLIN,) if self.experts > 1 else self.choice or INT4_KERNELS

    @property
    def is_from_int4(self) -> bool:
        """Whether each pass computes the weight from a smaller one."""
        return 0 < self.source_bytes < self.weight_bytes

    @property
    def fills_marlin(self) -> bool:
        return any(self.outputs % rows == 0 and self.inputs % columns == 0 for rows, columns in MARLIN_TILES)

    def with_outputs(self, outputs: int) -> Linear:
        return replace(self, outputs=outputs, weight_bytes=self.weight_bytes * outputs / self.outputs)

    def share(self, name: str, devices: int) -> Linear:
        """Return one device's part, as vLLM splits the linear; raise FlexQuantError for an uneven size."""
        leaf = name.rpartition(".")[2]
        if leaf in REPLICATED:
            return self
        by_inputs = leaf in ROW_PARALLEL
        size, what = (self.inputs, "inputs") if by_inputs else (self.outputs, "outputs")
        if size % devices:
            problem = f"the {size} {what} of '{name}' cannot be shared evenly by {devices} devices"
            raise FlexQuantError(f"{problem}; give a --tensor-parallel-size that divides them")
        if not by_inputs:
            return self.with_outputs(size // devices)
        return replace(self, inputs=size // devices, weight_bytes=self.weight_bytes / devices)

    def derived(self, derivation: Derivation) -> Linear:
        """Return the linear of a variant that is derived from this one's, or this one if none is.

        Experts, and in INT4 variants what is in 16 bits, stay. One copy computes an INT8 weight in each pass.
        """
        source = "bf16" if derivation.source == "bf16" else "w4a16"
        if self.scheme != source or self.experts > 1:
            return self
        if not derivation.is_one_copy:
            return replace(self, scheme=W4A8 if derivation.activations == "fp8" else W4A8_INT8)
        int8 = float(self.outputs * self.inputs)
        return replace(self, scheme="w8a8", weight_bytes=int8, source_bytes=self.weight_bytes)

    def nested_in(self, source: Linear) -> Linear:
        """Return this INT8 linear as computed in each pass from ``source``'s INT4 weight and differences."""
        weights = self.outputs * self.inputs
        exceptions = self.outputs * count_exceptions(self.inputs)
        stored = weights / 2 + 4 * (2 * self.outputs + self.inputs) + 3 * exceptions
        return replace(self, weight_bytes=weights, source_bytes=source.weight_bytes, difference_bytes=stored)


def plain_linear(outputs: int, inputs: int) -> Linear:
    return Linear(outputs, inputs, 2 * outputs * inputs, "bf16")


@dataclass(frozen=True)
class ModelShape:
    """One device's share of a model, with all of its variants."""

    num_layers: int
    kv_bytes_per_token: float
    """Sliding windows count as full attention."""
    state_bytes: float
    """Bytes of a request's states, in layers that have these in place of a KV cache."""
    attention_flops: float
    """Operations for one query token and one key token in all layers: scores and weighted sum."""
    linears: Mapping[str, Mapping[Linear, int]]
    """Variant -> linear of the decoder layers -> calls in a pass."""
    head: Linear
    own_bytes: Mapping[str, float]
    """Variant -> bytes of the tensors that no other variant has."""
    shared_bytes: float

    @property
    def resident_bytes(self) -> float:
        """Bytes of all variants' weights; shared tensors count once."""
        return self.shared_bytes + sum(self.own_bytes.values())

    def with_nested(self, name: str, source: str) -> ModelShape:
        """Return the model with the W8A8 variant ``name`` nested in the INT4 weights of ``source``."""
        of_shape = {(x.outputs, x.inputs): x for x in self.linears[source]}
        linears = {
            x.nested_in(of_shape[x.outputs, x.inputs]) if x.scheme == "w8a8" else x: n
            for x, n in self.linears[name].items()
        }
        return self._with_one_copy(name, source, linears)

    def with_derived(self, name: str, derivation: Derivation) -> ModelShape:
        """Return the model with a derived variant; W4A8 has a second copy of the INT4 weights."""
        linears: Counter[Linear] = Counter()
        for linear, count in self.linears[derivation.source].items():
            linears[linear.derived(derivation)] += count
        if derivation.is_one_copy:
            return self._with_one_copy(name, derivation.source, linears)
        own = sum(x.weight_bytes * n for x, n in linears.items() if x.scheme in (W4A8, W4A8_INT8))
        return replace(self, linears={**self.linears, name: linears}, own_bytes={**self.own_bytes, name: own})

    def _with_one_copy(self, name: str, source: str, linears: Mapping[Linear, int]) -> ModelShape:
        """Return the model with a variant that computes its weights in each pass from those of ``source``.

        It takes memory for its largest one, and the source's passes run on a kernel whose layout it reads.
        """
        own = sum(x.difference_bytes * n for x, n in linears.items())
        own += max(x.weight_bytes for x in linears if x.source_bytes)
        stored = {replace(x, choice=LAYOUTS_OF_ONE_COPY): n for x, n in self.linears[source].items()}
        of_all = {**self.linears, source: stored, name: linears}
        return replace(self, linears=of_all, own_bytes={**self.own_bytes, name: own})


@dataclass(frozen=True)
class PlannedModel:
    """A model whose linears are not quantised yet."""

    source: str
    config: PretrainedConfig
    """The language model's, with transformers' defaults for what ``config.json`` leaves out."""
    caches: Sequence[LayerCache]
    linears: Mapping[str, Linear]
    """Name, as vLLM fuses it -> linear of a decoder layer, in 16 bits."""
    kept: frozenset[str]
    """Names of the linears that no recipe quantises, such as routers."""
    head: Linear
    rest_bytes: float
    """Bytes of everything but the linears of decoder layers."""
    has_towers: bool
    """Whether the model also reads images or sound; what does so is not counted."""

    @classmethod
    def read(cls, model: str) -> PlannedModel:
        """Read the ``config.json`` of a folder or id; raise FlexQuantError if no model is built by it."""
        folder = find_model(model, (CONFIG_FILE,))
        check_folder(folder)
        whole = read_json(confined_file(folder, CONFIG_FILE))
        text = {key: whole[key] for key in ("tie_word_embeddings",) if key in whole} | text_config(whole)
        config, caches, parameters, quantised = _build(text, str(folder / CONFIG_FILE))
        linears: dict[str, Linear] = {}
        rest, kept = 0, set()
        for name, shape in parameters.items():
            module = name.removesuffix(".weight")
            is_matrix = len(shape) == 2 and name.endswith(".weight")
            if not decoder_layer(name) or not (is_matrix or name in quantised and len(shape) > 1):
                rest += 2 * prod(shape)
                continue
            call = fused_name(module)
            linear = plain_linear(*shape[-2:])
            if len(shape) == 3:
                linear = replace(linear, experts=shape[0])
            if call in linears:
                linear = replace(linear, outputs=linear.outputs + linears[call].outputs)
            linears[call] = linear
            if name not in quantised:
                kept.add(call)
        if not linears.keys() - kept:
            problem = f"{model} has no linears in decoder layers, which the cost model is about"
            raise FlexQuantError(f"{problem}; give a causal language model")
        matrices = (shape for shape in parameters.values() if len(shape) == 2)
        head = plain_linear(*(parameters.get("lm_head.weight") or next(matrices)))
        return cls(model, config, caches, linears, frozenset(kept), head, rest, reads_more_than_text(whole))

    @property
    def has_experts(self) -> bool:
        return any(linear.experts > 1 for linear in self.linears.values())

    def shape(self, schemes: Iterable[str], devices: int, derived: Mapping[str, Derivation]) -> ModelShape:
        """Return one device's share of the model with a variant, named after it, in each of ``schemes``.

        ``derived`` are variants that a policy derives from these. Bytes are divided evenly.
        Raises FlexQuantError for a model without attention or with latent attention, for heads and linears
        that the ``devices`` cannot share, and as :func:`active_experts` does.
        """
        with_attention = [cache for cache in self.caches if cache.heads]
        if not with_attention or getattr(self.config, "kv_lora_rank", None):
            problem = f"{self.source} has {'multi-head latent' if with_attention else 'no'} attention"
            advice = "measure them with 'flexquant tune'"
            raise FlexQuantError(f"{problem}, and passes of such a model cannot be predicted; {advice}")
        for cache in with_attention:
            cache.check(devices, self.source)
        stored = (cache for cache in with_attention if not cache.is_shared)

        def part(name: str, linear: Linear) -> Linear:
            if linear.experts > 1:
                linear = replace(linear, active_experts=active_experts(self.config, self.source))
            if name.endswith(tuple(QKV)):
                cache = self.caches[(layer_number(name) or 0) % len(self.caches)]
                linear = linear.with_outputs(linear.outputs + cache.repeated(devices))
            return linear.share(name, devices)

        whole = {s: {name: self._in_scheme(name, s) for name in self.linears} for s in schemes}
        model = ModelShape(
            len(self.caches),
            NUMBER_BYTES * sum(c.heads * c.width + c.repeated(devices) for c in stored) / devices,
            NUMBER_BYTES * sum(cache.states for cache in self.caches) / devices,
            2 * sum(cache.queries * cache.width for cache in with_attention) / devices,
            {s: Counter(part(name, x) for name, x in of.items()) for s, of in whole.items()},
            self.head.with_outputs(ceil(self.head.outputs / devices)),
            {s: sum(x.experts * x.weight_bytes for x in of.values()) / devices for s, of in whole.items()},
            self.rest_bytes / devices,
        )
        for name, derivation in derived.items():
            model = model.with_derived(name, derivation)
        return model

    def _in_scheme(self, name: str, scheme: str) -> Linear:
        linear = self.linears[name]
        weights = linear.outputs * linear.inputs
        if name in self.kept or scheme == "bf16":
            return replace(linear, weight_bytes=2 * weights)
        of_int4 = weights / 2 + 2 * weights / self.group_size
        nbytes = of_int4 if scheme in INT4 else weights + 2 * linear.outputs
        return replace(linear, scheme=scheme, weight_bytes=nbytes)

    @property
    def group_size(self) -> int:
        """Inputs of a group of INT4 weights, as the recipes choose it."""
        inputs = {linear.inputs for name, linear in self.linears.items() if name not in self.kept}
        fitting = (size for size in GROUP_SIZES if all(number % size == 0 for number in inputs))
        return next(fitting, GROUP_SIZES[-1])


def _build(config: JsonObject, source: str) -> Built:
    """Return a language model's config, caches, shapes of parameters, and those that a recipe quantises.

    A linear's shape ends with outputs and inputs. ``config`` is the language model's part.
    """
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModel, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # its warnings are about models that run
    try:
        text = build_config(config).get_text_config()
        count_layers({"num_hidden_layers": getattr(text, "num_hidden_layers", None)})
        has_head = type(text) in MODEL_FOR_CAUSAL_LM_MAPPING
        with torch.device("meta"):
            model = build_model(AutoModelForCausalLM if has_head else AutoModel, text)
            caches = read_caches(model, text)
    except FlexQuantError as e:
        raise FlexQuantError(f"{source}: {e}") from e
    except Exception as e:  # a class of transformers can raise anything
        problem = f"{source}: transformers cannot build the model ({said_by(e)})"
        raise FlexQuantError(f"{problem}; give a causal language model of a type that it knows") from e
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if not has_head and not getattr(text, "tie_word_embeddings", True):
        shapes["lm_head.weight"] = (text.vocab_size, text.hidden_size)
    turned = tuple(f"{n}." for n, module in model.named_modules() if getattr(module, "is_transposed", False))
    named = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    linears = {f"{name}.weight" for name in named if decoder_layer(name)}
    experts = {name for name, shape in shapes.items() if ".experts." in name and len(shape) == 3}
    shapes |= {n: (shapes[n][0], *shapes[n][:0:-1]) for n in experts if n.startswith(turned)}
    return text, caches, shapes, linears | experts
