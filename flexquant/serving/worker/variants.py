# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Build several variants in one process: a model for each precision, over one set of attention layers.

A *variant* is a whole model: vLLM's own class for the base architecture, built with that variant's own
compressed-tensors config, so that every linear layer has vLLM's own kernel for its scheme. All have the same
layer names, which a checkpoint's ``targets`` and ``ignore`` lists state, but vLLM registers attention layers
by name, in ``static_forward_context``, to give each its part of the KV cache. So all variants but the first
are built against a scratch dictionary, and then their attention modules are replaced by the first variant's:
*one* KV cache, written and read by all. Modules whose tensors are the same in every variant (embedding, final
norm, lm_head, what reads images, experts) are replaced in the same way.
A *derived* variant (`w4a8`) is its source built again, with other kernels in the INT4 layers alone; one
that computes its weights in each pass is a view of its source (`one_copy`).
Layers that keep a state beside their linears stay with their variant, and share the state (`layers_by_name`).

Only the decoder layers that some plan takes from a variant have memory. The others are built with their
linears and experts on the meta device, so that vLLM's classes find what they need, and are then removed.
"""

import copy
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from compressed_tensors.utils import patch_attr
from torch import nn
from vllm.config import VllmConfig

from flexquant.checkpoint.merged_config import MergedConfig, StoredVariant
from flexquant.checkpoint.module_names import HEAD, is_in
from flexquant.errors import FlexQuantError
from flexquant.policy.routes import RouteTable
from flexquant.serving.config import ServingOptions
from flexquant.serving.draft_heads import take_section
from flexquant.serving.kernels.choice import choose_kernels, sizes_by_variant
from flexquant.serving.kernels.layers import expert_layers, expert_layers_by_path
from flexquant.serving.vllm_api import (
    AttentionLayerBase,
    LinearBase,
    MambaBase,
    MoERunner,
    ParallelLMHead,
    QuantizationConfig,
    QuantizeMethodBase,
    VocabParallelEmbedding,
    initialize_model,
)
from flexquant.serving.worker import layers_by_name
from flexquant.serving.worker.int8_head import hold_heads_in_int8
from flexquant.serving.worker.one_copy import nesting_in, one_copy_of, read_sources
from flexquant.serving.worker.plan_views import check_structure, stack_of_layers
from flexquant.serving.worker.rotations import provide_rotations
from flexquant.serving.worker.w4a8 import modules_as_in_source, use_8bit_activations


def variant_vllm_config(
    vllm_config: VllmConfig, variant: StoredVariant, base_architecture: str
) -> VllmConfig:
    """Return the config that vLLM would have for the variant's own checkpoint."""
    model_config = copy.copy(vllm_config.model_config)
    model_config.hf_config = copy.deepcopy(model_config.hf_config)
    take_section(model_config, variant.quantization_config)
    model_config.hf_config.architectures = [base_architecture]
    # This is often the config itself; with all variants in it, changing one would recompile all plans.
    model_config.hf_text_config = model_config.hf_config.get_text_config()
    if not variant.own_head and getattr(model_config, "word_embeddings_untied_by_checkpoint", False):
        # vLLM untied lm_head and embedding because of another variant's lm_head.
        model_config.hf_config.tie_word_embeddings = True
        model_config.hf_text_config.tie_word_embeddings = True
    config = copy.copy(vllm_config)
    config.model_config = model_config
    config.quant_config = VllmConfig.get_quantization_config(model_config, vllm_config.load_config)
    return config


@contextmanager
def scratch_forward_context(vllm_config: VllmConfig) -> Iterator[dict[str, nn.Module]]:
    """Let layers register under names that are already in use; yield what they register."""
    compilation = vllm_config.compilation_config
    real, compilation.static_forward_context = compilation.static_forward_context, {}
    in_order = list(compilation.static_all_moe_layers)
    try:
        yield compilation.static_forward_context
    finally:
        compilation.static_forward_context = real
        compilation.static_all_moe_layers[:] = in_order


def replace_modules(root: nn.Module, replacements: dict[nn.Module, nn.Module]) -> None:
    """Replace each key of ``replacements`` by its value below ``root``; tie lm_heads to new embeddings."""
    for old, new in replacements.items():
        if isinstance(new, VocabParallelEmbedding):
            for head in [module for module in root.modules() if isinstance(module, ParallelLMHead)]:
                if head is not old and getattr(head, "weight", head) is getattr(old, "weight", old):
                    head.tie_weights(new)
    for parent in list(root.modules()):
        for name, child in parent._modules.items():
            if child in replacements:
                parent._modules[name] = replacements[child]


def build_variants(
    vllm_config: VllmConfig, merged: MergedConfig, routes: RouteTable, prefix: str
) -> dict[str, nn.Module]:
    """Build the variants that plans need over one set of attention layers; the weights are loaded later.

    Those without weights come last. Raises :class:`FlexQuantError` without a stack of layers.
    """
    provide_rotations()
    names = [name for name in (*merged.variants, *routes.derived) if name in routes.layers]
    names.sort(key=lambda name: name in routes.nested)  # after their sources
    real_context = vllm_config.compilation_config.static_forward_context
    variants: dict[str, nn.Module] = {}
    for name in filter(routes.has_weights, names):
        with scratch_forward_context(vllm_config) if variants else nullcontext(real_context) as registered:
            source = variants.get(routes.nested.get(name, ""))
            variant = build_variant(vllm_config, merged, name, routes, prefix, source)
        if variants:
            share_modules(name, variant, variants, registered, real_context, merged, routes)
        variants[name] = variant
    if routes.head == "int8":
        hold_heads_in_int8(variants.values())
    computed = [name for name in names if name not in variants]
    read_again = {routes.source(name) for name in computed} | {*routes.nested.values()}
    named = ServingOptions.from_vllm(vllm_config).kernels
    choose_kernels(variants, sizes_by_variant(routes), read_again, named)
    for name in filter(routes.nested.__contains__, variants):
        read_sources(variants[name], name)
    for name in computed:
        of, precision = routes.source(name), routes.derived[name].weights
        variants[name] = one_copy_of(variants[of], name, precision, merged.variants[of].is_in_16_bit)
        layers_by_name.share_states_of_view(variants[name], name, real_context)
    return variants


def build_variant(
    vllm_config: VllmConfig,
    merged: MergedConfig,
    name: str,
    routes: RouteTable,
    prefix: str,
    nested_in: nn.Module | None = None,
) -> nn.Module:
    """Build one variant with separate attention layers; ``nested_in``: the variant that it is nested in."""
    architecture, layers = merged.base_architecture, routes.layers[name]
    config = variant_vllm_config(vllm_config, merged.variants[routes.source(name)], architecture)
    # --cpu-offload-gb needs layers with memory: vLLM copies each layer as soon as it is built.
    offloads = vllm_config.offload_config.uva.cpu_offload_gb > 0
    # A published checkpoint in 16 bit has one variant, of which every layer is taken.
    needs_all = offloads or config.quant_config is None
    memory = nullcontext() if needs_all else memory_for(layers, config.quant_config)
    nesting = nesting_in(nested_in, config.quant_config)
    with layers_by_name.explained_kernels(name, vllm_config), nesting, memory:
        variant = initialize_model(config, prefix=prefix, model_class=layers_by_name.base_class(vllm_config))
    check_structure(variant, architecture)
    leave_out(variant, layers, vllm_config.compilation_config.static_forward_context)
    activations = routes.derived[name].activations if name in routes.derived else None
    if activations is not None:
        use_8bit_activations(variant, activations)
    layers_by_name.check_precision(name, variant, activations)
    return variant


def share_modules(
    name: str,
    variant: nn.Module,
    variants: Mapping[str, nn.Module],
    registered: Mapping[str, nn.Module],
    real_context: dict[str, nn.Module],
    merged: MergedConfig,
    routes: RouteTable,
) -> None:
    """Replace what a variant shares with ``variants``, built before it; ``registered`` are its own layers."""
    layers, source, here = routes.layers, routes.source(name), layers_here(variant)
    of_source = layers[source] if source in variants else frozenset()

    def owner(module: str) -> str:
        return next((first for first in (*variants, name) if is_in(module, layers[first])), "")

    replacements: dict[nn.Module, nn.Module] = {}
    for layer_name, layer in registered.items():
        if isinstance(layer, MambaBase):
            layers_by_name.keep_state(layer_name, layer, name, real_context, [*variants.values(), variant])
        elif isinstance(layer, AttentionLayerBase):
            if owner(layer_name) == name:
                real_context[layer_name] = layer
            elif is_in(layer_name, layers[name]):
                replacements[layer] = real_context[layer_name]
        elif layer not in expert_layers(variant):
            what = f"layer '{layer_name}' ({type(layer).__name__}) of {merged.base_architecture}"
            problem = "is looked up by name at run time and cannot exist in several variants yet"
            raise FlexQuantError(f"{what} {problem}; serve one variant's own checkpoint")
    owners = {module: owner(module) for module in merged.shared_modules if is_in(module, here)}
    if source in variants:
        owners |= {m: source for m in modules_as_in_source(variant) if is_in(m, of_source & here)}
    for path, layer in expert_layers_by_path(variant).items():
        if is_in(path, of_source):
            there = variants[source].get_submodule(path).modules()
            # The block around an expert layer also holds the shared experts, and loads them.
            replacements |= dict(zip(layer.modules(), there, strict=True))
        else:
            layer.layer_name = f"{layer.layer_name}{layers_by_name.APART}{name}"
            real_context[layer.layer_name] = layer
    for other in set(owners.values()) - {name}:
        common = [module for module, has_it in owners.items() if has_it == other]
        of_other = find_modules(variants[other], common)
        replacements |= dict(zip(find_modules(variant, common), of_other, strict=True))
    check_cache_layers(registered, replacements, merged.base_architecture)
    replace_modules(variant, replacements)


def find_modules(model: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """Return modules by their checkpoint's names, experts as one; raise FlexQuantError if one is missing."""
    found = dict(model.named_modules(remove_duplicate=False))
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    modules = []
    for name in names:
        mapped = mapper.apply_list([f"{name}.weight"]) if mapper is not None else []
        in_vllm = mapped[0].removesuffix(".weight") if mapped else name
        if (module := found.get(name, found.get(in_vllm))) is not None:
            modules.append(module.routed_experts if isinstance(module, MoERunner) else module)
        elif not HEAD.search(name):
            lacks = f"which {type(model).__name__} of this vLLM does not have"
            advice = "serve one variant's own checkpoint ('flexquant split')"
            raise FlexQuantError(f"the checkpoint's variants share the module '{name}', {lacks}; {advice}")
    return modules


def check_cache_layers(
    registered: Mapping[str, nn.Module], replaced: Container[nn.Module], architecture: str
) -> None:
    """Refuse layers that variants share (``replaced``), but that hold linears of which each has its own."""
    for name, layer in registered.items():
        inside = layer.modules() if layer in replaced else ()
        if any(isinstance(module, LinearBase) and module not in replaced for module in inside):
            problem = f"layer '{name}' ({type(layer).__name__}) of {architecture} keeps a state and the"
            problem += " linears that compute it in one, and cannot exist in several variants"
            raise FlexQuantError(f"{problem}; serve one variant's own checkpoint ('flexquant split')")


class AbsentLayer(nn.Module):
    """Takes the place of a decoder layer that no plan takes from its variant."""


@contextmanager
def memory_for(layers: Collection[int], quant_config: QuantizationConfig | None) -> Iterator[None]:
    """Build the linears and experts of all decoder layers but ``layers`` on the meta device."""
    assert quant_config is not None, "every variant is quantised"
    method_of = quant_config.get_quant_method

    def get_quant_method(layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        method = method_of(layer, prefix)
        if method is None or is_in(prefix, layers) or isinstance(layer, AttentionLayerBase):
            return method
        # A method that transforms a linear's inputs wraps the linear's own; all layers share its matrices.
        method_of_weights = getattr(method, "quant_method", method)
        create: Callable[..., None] = method_of_weights.create_weights

        def create_without_memory(*args: object, **kwargs: object) -> None:
            with torch.device("meta"):
                create(*args, **kwargs)

        vars(method_of_weights)["create_weights"] = create_without_memory
        return method

    with patch_attr(quant_config, "get_quant_method", get_quant_method):
        yield


def leave_out(variant: nn.Module, layers: Collection[int], registered: dict[str, nn.Module]) -> None:
    """Remove all decoder layers but ``layers`` from a variant, and their experts from ``registered``.

    Their attention stays registered, as its name has a place in the order of the KV cache's layers.
    """
    stack = stack_of_layers(variant)
    for number in layers_here(variant) - set(layers):
        for experts in expert_layers(stack[number]):
            del registered[experts.layer_name]
        stack[number] = AbsentLayer()


def layers_here(variant: nn.Module) -> set[int]:
    """Return the decoder layers that a variant has on this rank; other ranks' layers are empty modules."""
    return {n for n, layer in enumerate(stack_of_layers(variant)) if any(True for _ in layer.parameters())}
