# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Variants side by side, and plans as views over them: the heart of FlexQuant.

A *variant* is a whole model: vLLM's own class for the base architecture, built with that variant's own
compressed-tensors config, so that every linear layer has vLLM's own kernel for its scheme. Building the
same architecture again under the same layer names is what keeps a checkpoint's ``targets`` and ``ignore``
lists meaningful, but vLLM registers attention layers by name, in ``static_forward_context``, to give each
its part of the KV cache. So all variants but the first are built against a scratch dictionary, and then
their attention modules are replaced by the first variant's: *one* KV cache, written and read by all.
Modules outside the decoder layers whose tensors are the same in every variant (embedding, final norm,
lm_head) are replaced in the same way, and exist once. A *derived* variant (:mod:`flexquant.w4a8`) is its
source built once more with other kernels in the INT4 layers; it shares all else with the source.

A *plan* names a variant for every decoder layer. It is a shallow copy of a model whose ``layers`` are
picked from the variants: it owns no weight, and there is no branch in it, so that it compiles, captures
and fuses like the plain model. The decoder layer, norms included, is the unit of mixing, since
SmoothQuant moves scales between a layer's norms and its linears.

Each plan needs compile state of its own. vLLM compiles once per module instance, and finds compiled
artefacts on disk under a hash of the configuration and the *name* of the forward, not of what the
instance holds: two plans of one class would collide, and the second would silently run the first's
graph. Each plan therefore gets a copy of the config that differs in ``additional_config`` (which vLLM
hashes), and is set up under a model tag of its own (which names vLLM's Inductor cache folder).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import ModelRegistry

from flexquant.checkpoint import MergedConfig, Variant
from flexquant.errors import FlexQuantError
from flexquant.w4a8 import is_int4_layer, use_8bit_activations

if TYPE_CHECKING:
    from flexquant.policy import Derivation
    from flexquant.routes import Plan


def variant_vllm_config(vllm_config: VllmConfig, variant: Variant, base_architecture: str) -> VllmConfig:
    """Return the config that vLLM would have for the variant's own checkpoint."""
    model_config = copy.copy(vllm_config.model_config)
    model_config.hf_config = copy.copy(model_config.hf_config)
    model_config.hf_config.quantization_config = copy.deepcopy(variant.quantization_config)
    model_config.hf_config.architectures = [base_architecture]
    model_config.quantization = variant.quantization_config["quant_method"]
    config = copy.copy(vllm_config)
    config.model_config = model_config
    config.quant_config = VllmConfig.get_quantization_config(model_config, vllm_config.load_config)
    return config


@contextmanager
def scratch_forward_context(vllm_config: VllmConfig) -> Iterator[dict[str, Any]]:
    """Let layers register under names that are already taken; yield what they registered."""
    compilation = vllm_config.compilation_config
    real, compilation.static_forward_context = compilation.static_forward_context, {}
    try:
        yield compilation.static_forward_context
    finally:
        compilation.static_forward_context = real


def replace_modules(root: nn.Module, replacements: dict[nn.Module, nn.Module]) -> None:
    """Replace each key of ``replacements``, wherever it is a child below ``root``, by its value."""
    for parent in list(root.modules()):
        for name, child in parent._modules.items():
            if child in replacements:
                parent._modules[name] = replacements[child]


def build_variants(
    vllm_config: VllmConfig,
    merged: MergedConfig,
    names: list[str],
    derived: Mapping[str, Derivation],
    prefix: str,
) -> dict[str, nn.Module]:
    """Build the named variants over one set of attention layers; the weights are loaded later.

    ``names`` may include ``derived`` ones. Raises :class:`FlexQuantError` for an architecture that is not
    built as ``model.layers`` + ``lm_head``.
    """
    base_class, _ = ModelRegistry.resolve_model_cls(
        [merged.base_architecture], model_config=vllm_config.model_config
    )
    real_context = vllm_config.compilation_config.static_forward_context
    variants: dict[str, nn.Module] = {}

    def build(name: str) -> nn.Module:
        source = derived[name].source if name in derived else name
        config = variant_vllm_config(vllm_config, merged.variants[source], merged.base_architecture)
        variant = initialize_model(config, prefix=prefix, model_class=base_class)
        if name in derived:
            use_8bit_activations(variant, derived[name].activations)
        return variant

    for name in names:
        if not variants:
            variants[name] = build(name)
            check_structure(variants[name], merged.base_architecture)
            continue
        with scratch_forward_context(vllm_config) as registered:
            variant = build(name)
        for layer_name, layer in registered.items():
            if not isinstance(layer, AttentionLayerBase):
                raise FlexQuantError(
                    f"layer '{layer_name}' ({type(layer).__name__}) of {merged.base_architecture} is looked "
                    "up by name at run time and cannot exist in several variants yet; serve one variant's "
                    "own checkpoint"
                )
        owner, shared = next(iter(variants.values())), merged.shared_modules
        if name in derived and derived[name].source in variants:
            owner, shared = variants[derived[name].source], modules_as_in_source(variant)
        replacements = {layer: real_context[layer_name] for layer_name, layer in registered.items()}
        replacements |= {variant.get_submodule(module): owner.get_submodule(module) for module in shared}
        replace_modules(variant, replacements)
        variants[name] = variant
    return variants


def modules_as_in_source(variant: nn.Module) -> tuple[str, ...]:
    """The modules that a derived variant has in common with its source: all but the INT4 linear layers."""
    return tuple(
        name
        for name, module in variant.named_modules()
        if (module._parameters or module._buffers) and not is_int4_layer(module)
    )


def check_structure(model: nn.Module, architecture: str) -> None:
    inner = getattr(model, "model", None)
    if not isinstance(getattr(inner, "layers", None), nn.ModuleList) or not hasattr(model, "lm_head"):
        raise FlexQuantError(
            f"{architecture} is not built as 'model.layers' + 'lm_head' in this vLLM; FlexQuant serves "
            "decoder-only architectures of that form, such as Llama, Qwen2, Qwen3, Mistral and Gemma 3"
        )


def shallow_copy(module: nn.Module, **children: nn.Module) -> nn.Module:
    """Copy a module without its weights, with some of its children replaced."""
    view = copy.copy(module)
    view._modules = {**module._modules, **children}
    return view


def build_plan(variants: Mapping[str, Any], plan: Plan) -> nn.Module:
    """Return a causal LM whose decoder layer i is that of variant ``plan.layers[i]``.

    Everything outside the decoder layers comes from the variant that runs the plan's last layer.
    """
    base = variants[plan.layers[-1]]
    layers = [variants[v].model.layers[i] for i, v in enumerate(plan.layers)]
    inner = shallow_copy(base.model, layers=nn.ModuleList(layers))
    if isinstance(inner, TorchCompileWithNoGuardsWrapper) and not inner.do_not_compile:
        give_own_compile_state(inner, plan.name, base.model.vllm_config)
    return shallow_copy(base, model=inner)


def give_own_compile_state(inner: Any, plan_name: str, vllm_config: VllmConfig) -> None:
    config = copy.copy(vllm_config)
    additional: Any = vllm_config.additional_config or {}
    config.additional_config = {**additional, "flexquant_plan": plan_name}
    inner.vllm_config = config
    inner.compiled = False
    inner._compile_tag = "flexquant-" + re.sub(r"[^\w-]+", "_", plan_name)
    with set_model_tag(inner._compile_tag), set_current_vllm_config(config):
        TorchCompileWithNoGuardsWrapper.__init__(inner)
