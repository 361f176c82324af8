# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Build plans as views over the variants, each with compile state of its own.

A *plan* names a variant for every decoder layer. It is a shallow copy of a model whose ``layers`` are taken
from the variants: it owns no weights and has no branches, so it compiles, captures and fuses like the plain
model. Plans mix whole decoder layers, norms included, since SmoothQuant moves scales between a layer's norms
and its linears.

vLLM finds compiled artefacts on disk by a hash of the configuration and the *name* of the forward, not of the
instance's content: two plans of one class would collide, and the second would silently run the first's graph.
So each plan gets a copy of the config with a digest of all that it computes with in ``additional_config``,
which vLLM hashes, and a model tag with that digest, which names vLLM's Inductor cache folder. The policy is
not part of the key, so another policy finds the compiled plans, unless other kernels are the fastest for it.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import TypeGuard

from torch import nn
from vllm.config import VllmConfig

from flexquant import __version__
from flexquant.checkpoint.merged_config import MergedConfig
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.module_names import STACKS
from flexquant.documents.results import digest_of, versions_of
from flexquant.errors import FlexQuantError
from flexquant.policy.plans import Plan
from flexquant.policy.rules import source_of
from flexquant.policy.schema import Derivation
from flexquant.serving.config import OPTIONS_KEY, RESOLVED_KEY, additional_config
from flexquant.serving.kernels.layers import kernel_classes
from flexquant.serving.vllm_api import (
    TorchCompileWithNoGuardsWrapper,
    set_current_vllm_config,
    set_model_tag,
    supports_multimodal,
)


def shallow_copy(module: nn.Module, **children: nn.Module) -> nn.Module:
    """Copy a module but not its weights, with some children replaced; its bound methods become the copy's."""
    view = copy.copy(module)
    view._modules = {**module._modules, **children}
    for name, value in vars(module).items():
        if isinstance(value, MethodType) and value.__self__ is module:
            vars(view)[name] = MethodType(value.__func__, view)
    return view


def decoder_path(model: nn.Module) -> str:
    """Return the name of the module that holds the decoder layers (of a vision model's language model)."""
    if not supports_multimodal(model):
        return "model" if hasattr(model, "model") else "transformer"
    language_model = model.get_language_model()
    path = next(name for name, module in model.named_modules() if module is language_model)
    return path if hasattr(language_model, "layers") else f"{path}.model"


def check_structure(model: nn.Module, architecture: str) -> None:
    """Raise :class:`FlexQuantError` if a model has no stack of decoder layers where FlexQuant finds it."""
    inner = dict(model.named_modules()).get(decoder_path(model))
    if not any(isinstance(getattr(inner, name, None), nn.ModuleList) for name in STACKS):
        problem = f"{architecture} is not built with 'model.layers' or 'transformer.h' in this vLLM"
        served = "decoder-only architectures of that form, such as Llama, Qwen3, Mistral and Gemma 3"
        raise FlexQuantError(f"{problem}; FlexQuant serves {served}")


def stack_path(model: nn.Module) -> str:
    """Return the name of the list of a model's decoder layers, such as ``model.layers``."""
    path = decoder_path(model)
    return next(f"{path}.{name}" for name in STACKS if hasattr(model.get_submodule(path), name))


def stack_of_layers(model: nn.Module) -> nn.ModuleList:
    """Return the decoder layers of one variant."""
    layers = model.get_submodule(stack_path(model))
    assert isinstance(layers, nn.ModuleList)
    return layers


def with_module(root: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """Return a shallow copy of ``root`` in which ``module`` replaces the module named ``path``."""
    name, _, below = path.partition(".")
    child = with_module(root.get_submodule(name), below, module) if below else module
    return shallow_copy(root, **{name: child})


def build_plan(
    variants: Mapping[str, nn.Module], plan: Plan, merged: MergedConfig, derived: Mapping[str, Derivation]
) -> nn.Module:
    """Return a causal LM whose decoder layer i is taken from variant ``plan.layers[i]``.

    Other modules are the last layer's variant's. ``merged``, ``derived``: how variants are quantised.
    """
    base = variants[plan.layers[-1]]
    path, _, stack = stack_path(base).rpartition(".")
    stacks = {name: stack_of_layers(variants[name]) for name in plan.variants}
    layers = [stacks[v][i] for i, v in enumerate(plan.layers)]
    inner = shallow_copy(base.get_submodule(path), **{stack: nn.ModuleList(layers)})
    key = plan_key(plan, merged, derived, kernel_classes(inner))
    if is_compiled(inner):
        give_own_compile_state(inner, plan.name, digest_of(key), inner.vllm_config)
    # vLLM calls eval() on the whole model later, which does not reach views.
    return with_module(base, path, inner).eval()


def is_compiled(inner: nn.Module) -> TypeGuard[TorchCompileWithNoGuardsWrapper]:
    """Whether vLLM compiles a causal LM's inner model, the one that holds the decoder layers."""
    return isinstance(inner, TorchCompileWithNoGuardsWrapper) and not inner.do_not_compile


def plan_key(
    plan: Plan, merged: MergedConfig, derived: Mapping[str, Derivation], kernels: Mapping[str, Sequence[str]]
) -> JsonObject:
    """Return what a plan's compiled code depends on beside vLLM's own key.

    These are the variant of every layer, the classes that compute every linear (:func:`kernel_classes`), and
    each variant's quantisation config, that of the variant in which it is nested, and its derivation.
    """
    schemes = {}
    for name in plan.variants:
        derivation, source = derived.get(name), merged.variants[source_of(name, derived)]
        nested_in = merged.variants[source.nested_in].quantization_config if source.nested_in else None
        schemes[name] = {
            "quantization_config": source.quantization_config,
            "nested_in": nested_in,
            "derivation": derivation and [derivation.activations, derivation.weights],
        }
    model = {"architecture": merged.base_architecture, "layers": plan.layers, "schemes": schemes}
    return {"flexquant": __version__, **versions_of(("humming-kernels",)), **model, "kernels": kernels}


def give_own_compile_state(
    inner: TorchCompileWithNoGuardsWrapper, plan_name: str, digest: str, vllm_config: VllmConfig
) -> None:
    """Have ``inner``, a shallow copy of a compiled module, compiled and cached by itself."""
    additional = additional_config(vllm_config) | {"flexquant_plan": f"{plan_name} {digest}"}
    config = copy.copy(vllm_config)
    config.additional_config = {k: v for k, v in additional.items() if k not in (OPTIONS_KEY, RESOLVED_KEY)}
    inner.vllm_config = config
    inner.compiled = False
    tag = f"flexquant-{re.sub(r'[^a-zA-Z0-9_-]+', '_', plan_name)}-{digest[:16]}"
    vars(inner)["_compile_tag"] = tag
    with set_model_tag(tag), set_current_vllm_config(config):
        TorchCompileWithNoGuardsWrapper.__init__(inner)
