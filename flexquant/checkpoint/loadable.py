# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Say from settings and headers whether vLLM loads a checkpoint of compressed-tensors, on any device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.module_names import DRAFTS, EXPERTS, FUSED, decoder_layer
from flexquant.checkpoint.patterns import expressions_of_dynamic, fitting
from flexquant.checkpoint.safetensors_io import TensorRef
from flexquant.checkpoint.schemes import (
    CLASSES,
    FLOAT_DTYPES,
    IN_ANOTHER_ORDER,
    LINEAR,
    OF_HEADS,
    PACKED_SUFFIX,
    QUANTISATION_PARAMETER,
    WORD_BITS,
    LinearSchemes,
    is_readable,
    shape_problem,
    stored_shape,
    unlike,
)
from flexquant.errors import FlexQuantError

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

COMPRESSED_TENSORS = "compressed-tensors"
PACKED = "pack-quantized"
WITH_ACTIVATIONS = ("naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized")
"""Formats in which vLLM looks for a scheme that quantises activations."""
ALWAYS_QUANTISED = {*FUSED, "o_proj", "down_proj", "w1", "w2", "w3", "fc"}
"""Last parts of the names of linears that vLLM builds in the scheme that the settings give them."""
ROUTERS = ("gate", "router", "shared_expert_gate")
PLAIN = re.compile(r".*(\.eh_proj|mtp_layers\.\d+\.input_proj|mtp_linear_proj\.\d+|model\.mtp\..*\.o_proj)")
"""Matches the names of linears in heads that draft (MTP) which vLLM always has in 16 bit."""
IN_16_BIT = "is in 16 bit, though a config group quantises it; add it to 'ignore'"
FP8_CACHE = {"type": "float", "num_bits": 8, "symmetric": True}
CACHE_SCALE = re.compile(r"[qkv]_(scale|zero_point)")
"""Matches the names of an attention layer's scales, which vLLM finds beside K and V too."""


def check_loadable(section: JsonObject, tensors: Mapping[str, TensorRef], owner: str) -> None:
    """Raise FlexQuantError, naming the module, unless vLLM loads ``tensors`` by these settings.

    ``section`` is a ``quantization_config``; in another format, patterns alone are looked at. ``owner`` names
    the checkpoint in messages. Only headers are read.
    """
    if section.get("quant_method", COMPRESSED_TENSORS) != COMPRESSED_TENSORS:
        fitting(expressions_of_dynamic(section), {name.rpartition(".")[0] for name in tensors}, owner)
        return
    schemes = LinearSchemes(section, owner, tensors)
    _check_section(section, schemes, owner)
    parameters: dict[str, dict[str, TensorRef]] = {}
    for name, ref in tensors.items():
        module, _, parameter = name.rpartition(".")
        parameters.setdefault(module, {})[parameter] = ref
    if schemes.by_itself("lm_head") and not any(module.endswith("lm_head") for module in parameters):
        raise FlexQuantError(f"{owner} quantises lm_head, which no file holds; add it to 'ignore'")
    for _, modules in sorted(schemes.layers.items()):
        compared: list[JsonObject | None] = []
        for module in modules:
            linear = _Linear(module, parameters[module], schemes)
            compared.append(linear.compared())
            if compared[-1] != compared[0]:
                raise unlike(owner, modules[0], module)
            if problem := linear.problem():
                raise FlexQuantError(f"layer '{module}' of {owner} {problem}")


def is_sparse(section: JsonObject) -> bool:
    """Whether a ``quantization_config`` says that zeros among the weights are left out."""
    sparsity = section.get("sparsity_config")
    return bool(sparsity) and not (isinstance(sparsity, dict) and sparsity.get("format", "dense") == "dense")


def _check_section(section: JsonObject, schemes: LinearSchemes, owner: str) -> None:
    """Raise FlexQuantError for settings at which vLLM stops, whether a module has them or not."""
    if is_sparse(section) or (section.get("sparsity_config") or {}).get("targets"):
        found = f"{owner} has sparsity_config {section['sparsity_config']!r}"
        advice = "take a checkpoint without it (a merge drops the format 'dense')"
        raise FlexQuantError(f"{found}, and vLLM loads no sparse weights; {advice}")
    for name, group in schemes.groups.items():
        if problem := _group_problem(group, schemes.format_of(group)):
            raise FlexQuantError(f"config group '{name}' of {owner} {problem}; quantise the model again")
    cache = section.get("kv_cache_scheme")
    if cache is not None:
        read = {key: cache.get(key) for key in ("type", "num_bits", "strategy", "symmetric")}
        if read not in ({**FP8_CACHE, "strategy": strategy} for strategy in ("tensor", "attn_head")):
            loads = f"vLLM loads {FP8_CACHE} with the strategy 'tensor' or 'attn_head'"
            found = f"{owner} has kv_cache_scheme {read} in its quantization_config"
            raise FlexQuantError(f"{found}, and {loads}; quantise the model again")


def _group_problem(group: QuantizationScheme, form: str) -> str:
    """Return at what vLLM stops when it reads a group, even if no linear is in it; empty for nothing."""
    if group.weights is None:
        return "says nothing of weights, which vLLM does not load"
    if group.weights.actorder in ("group", "dynamic"):
        return f"has {IN_ANOTHER_ORDER}"
    if group.weights.type == "int" and group.input_activations is None and form in WITH_ACTIVATIONS:
        return f"quantises INT weights alone in the format {form!r}, in which vLLM looks for activations too"
    return ""


class _Linear:
    """A module with the parameters that a checkpoint has of it, by the last part of their names."""

    def __init__(self, module: str, parameters: Mapping[str, TensorRef], schemes: LinearSchemes) -> None:
        self.module, self.parameters, self.schemes = module, parameters, schemes
        self.scheme = schemes.of(module)
        self.leaf = module.rpartition(".")[2]
        self.is_expert = EXPERTS.match(module) is not None
        self.weight = parameters.get("weight_packed") or parameters.get("weight")
        self.is_quantised = self.weight is not None and (
            self.weight.dtype not in FLOAT_DTYPES or self.weight.name.endswith(PACKED_SUFFIX)
        )

    def compared(self) -> JsonObject | None:
        """Return what must be equal in the schemes of linears of one layer; vLLM compares all of experts'."""
        scheme = self.schemes.by_itself(self.module) if self.is_quantised else None
        if scheme is None:
            return None
        found: JsonObject = scheme.model_dump(exclude={"targets"})
        for args in found.values():
            if isinstance(args, dict) and not self.is_expert:
                args.update(observer=None, observer_kwargs=None)
        return found | {"format": self.schemes.format_of(scheme)}

    def problem(self) -> str:
        """Return why vLLM does not load the module by the scheme of its layer; empty if it does."""
        scheme, stays = self.scheme, PLAIN.fullmatch(self.module)
        if self.weight is None or not self.is_quantised:
            in_layer = decoder_layer(self.module) or (DRAFTS.search(self.module) and not stays)
            in_one = DRAFTS.search(self.module) and "gate_up_proj" in self.parameters  # all experts of a head
            if in_one and scheme is not None and self.schemes.by_itself(f"{self.module}.0.gate_proj"):
                return IN_16_BIT
            must_be = self.leaf in ALWAYS_QUANTISED and in_layer or self.leaf in CLASSES
            if scheme is None or self.weight is None:
                return self._unknown(set())
            return IN_16_BIT if must_be else ""
        is_head = CLASSES.get(self.leaf) == OF_HEADS
        if stays or self.leaf in ROUTERS:
            return "is quantised, and stays in 16 bit when merged; take a checkpoint that leaves it out"
        if self.leaf in CLASSES and not is_head:
            what = "is quantised, and vLLM looks rows up in it on GPUs alone, if its model does at all"
            return f"{what}; take a checkpoint that leaves it in 16 bit"
        if scheme is None or scheme.weights is None:
            none = f"is stored as {self.weight.dtype}, but no config group quantises it"
            if is_head and any(LINEAR in group.targets for group in self.schemes.groups.values()):
                what = f"{none}: the target '{LINEAR}' is not for vLLM's lm_head"
                return f"{what}; add 're:.*{self.leaf}' to the group's 'targets', and take it out of 'ignore'"
            return f"{none}; quantise it again"
        if len(self.weight.shape) != 2 or not all(self.weight.shape):
            return f"has a weight of shape {list(self.weight.shape)}, expected a matrix; quantise it again"
        form = self.schemes.format_of(scheme)
        if form == PACKED and not self.weight.name.endswith(PACKED_SUFFIX):
            return f"is stored as 'weight', and the format {form!r} has 'weight_packed'; quantise it again"
        has_known_shapes = is_readable(scheme.weights, form)
        if has_known_shapes and (problem := shape_problem(scheme.weights, self.weight, self.parameters.get)):
            return f"{problem}; quantise it again"
        if not is_served(scheme, form, is_expert=self.is_expert) or (is_head and not has_known_shapes):
            return f"has a scheme that vLLM does not load: {describe_linear(scheme, form)}; quantise it again"
        if is_head and (problem := self._head_problem(scheme.weights)):
            return f"is quantised {problem}; take a checkpoint that leaves it in 16 bit"
        return self._unknown(_parameters(scheme)) if has_known_shapes else ""

    def _head_problem(self, args: QuantizationArgs) -> str:
        """Return what vLLM's loader of embeddings and lm_heads does not load; empty if it loads all."""
        assert self.weight is not None
        rows = stored_shape(self.weight, self.parameters.get)[0]
        if args.strategy == "block":
            return "in blocks, whose scales vLLM does not load for an lm_head"
        zero_point, in_word = self.parameters.get("weight_zero_point"), WORD_BITS // args.num_bits
        if zero_point is not None and rows % in_word:
            return f"with zero points, which vLLM loads for multiples of {in_word} rows, not for {rows}"
        return ""

    def _unknown(self, expected: set[str]) -> str:
        """Return which parameter vLLM has no place for, or has none of."""
        for name in self.parameters:
            known = name in expected or CACHE_SCALE.fullmatch(name)
            if QUANTISATION_PARAMETER.search(f".{name}") and not known:
                return f"has {name}, which vLLM has no place for in this scheme; quantise it again"
        missing = sorted(expected - self.parameters.keys() - {"weight_shape"})
        return f"has no {missing[0]}; quantise it again" if missing else ""


def _parameters(scheme: QuantizationScheme) -> set[str]:
    """Return the parameters, but for weight and bias, of a linear in INT or FP8."""
    weights, inputs, outputs = scheme.weights, scheme.input_activations, scheme.output_activations
    assert weights is not None
    found = {"weight_scale", "weight_shape"}
    found |= set() if weights.symmetric else {"weight_zero_point"}
    if inputs is not None and not inputs.dynamic:
        found |= {"input_scale"} if inputs.symmetric else {"input_scale", "input_zero_point"}
    return found | ({"output_scale"} if outputs is not None else set())


def describe_linear(scheme: QuantizationScheme, form: str) -> str:
    """Return e.g. ``weights 8-bit int by channel, inputs dynamic 8-bit int by token, as int-quantized``."""

    def one(args: QuantizationArgs | None) -> str:
        if args is None:
            return "16 bit"
        kinds = ["" if args.symmetric else "asymmetric ", "dynamic " if args.dynamic else ""]
        size = f" {args.group_size}" if args.group_size else ""
        return f"{''.join(kinds)}{args.num_bits}-bit {args.type} by {args.strategy}{size}"

    outputs = f", outputs {one(scheme.output_activations)}" if scheme.output_activations else ""
    return f"weights {one(scheme.weights)}, inputs {one(scheme.input_activations)}{outputs}, as {form}"


def is_served(scheme: QuantizationScheme, form: str | None, *, is_expert: bool) -> bool:
    """Whether vLLM has a class for the scheme of a linear or of experts, stored in the format ``form``."""
    w, a, out = scheme.weights, scheme.input_activations, scheme.output_activations
    if w is None or w.dynamic:
        return False
    if _is_nvfp4(w):
        return a is None or _is_nvfp4(a)
    if w.type == "float" and w.strategy == "group":
        return w.symmetric and w.group_size == 32 and (w.num_bits == 4 or str(w.scale_dtype) == "torch.uint8")
    has_activations = is_expert or form in WITH_ACTIVATIONS
    by_token = a is not None and a.strategy == "token" and bool(a.dynamic)
    static = a is not None and not a.dynamic
    if w.type == "float":
        sound = has_activations and w.symmetric and w.strategy in ("tensor", "channel", "block")
        if not is_expert:
            return sound and not (static and w.strategy == "block")
        pair = (w.strategy, a.strategy) if a is not None and a.type == "float" else None
        in_blocks = pair is not None and w.strategy == "block" and not static
        return sound and (in_blocks or pair in (("tensor", "tensor"), ("channel", "token")))
    by_row = w.strategy in ("channel", "group")
    if a is None:
        return by_row and form == PACKED and 2 <= w.num_bits <= 8
    if a.type == "float":  # one device has kernels for these weights
        return w.num_bits == 4 and w.strategy == "group" and w.symmetric and a.num_bits == 8 and by_token
    if by_token and has_activations and w.symmetric and a.num_bits == 8:
        if w.num_bits == 8 and w.strategy in ("channel", "tensor"):
            return w.strategy == "channel" or not is_expert
        if w.num_bits == 4 and by_row:
            return True
    if is_expert:
        return False
    static = static and a.strategy == "tensor" and a.num_bits == 8
    if static and out is not None and by_row:
        whole = out.type == "int" and out.strategy == "tensor" and out.num_bits == 8 and not out.dynamic
        return whole and w.num_bits in (2, 4, 8) and form in (PACKED, "int-quantized")
    if static and has_activations:
        return w.num_bits == 8 and w.symmetric and w.strategy in ("channel", "tensor")
    grouped = bool(a.dynamic) and a.strategy in ("token", "group") and a.symmetric
    return by_row and form == PACKED and grouped and a.num_bits in (4, 8)


def _is_nvfp4(args: QuantizationArgs) -> bool:
    is_float = args.type == "float" and args.num_bits == 4 and args.symmetric
    return is_float and args.strategy == "tensor_group" and args.group_size == 16
