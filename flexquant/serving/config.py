# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""From vLLM's configuration and a policy to the route table, and what cannot be served is refused."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from flexquant.checkpoint.merged_config import VISION_ARCHITECTURES, MergedConfig, Variant
from flexquant.checkpoint.model_config import reads_more_than_text
from flexquant.errors import FlexQuantError
from flexquant.policy.routes import RouteTable, build_route_table
from flexquant.policy.rules import Derivation, Policy
from flexquant.policy.trigger import SignalTrigger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SPECULATIVE_METHODS = ("ngram", "draft_model", "eagle", "eagle3")
DRAFTS_FROM_TARGET = ("eagle", "eagle3")
"""Methods whose draft models may take embedding and lm_head from the model that they draft for."""


def check_supported(vllm_config: VllmConfig, merged: MergedConfig, routes: RouteTable) -> None:
    """Raise :class:`FlexQuantError` if a vLLM feature is asked for that a merged checkpoint cannot have."""
    from torch.nn import ModuleDict
    from vllm.config import CompilationMode, CUDAGraphMode

    from flexquant.serving.vllm_api import is_breakable_cudagraph_enabled

    parallel, compilation = vllm_config.parallel_config, vllm_config.compilation_config
    method = vllm_config.speculative_config and vllm_config.speculative_config.method
    graphs = compilation.cudagraph_mode or CUDAGraphMode.NONE
    one_head, one_embedding = has_one_head(merged, routes), has_one_embedding(merged, routes)
    model = vllm_config.model_config
    images, multimodal = model.is_multimodal_model, model.multimodal_config
    several_plans_a_size = not routes.ignores_phase()
    sources = {routes.source(variant) for plan in routes.plans for variant in plan.variants}
    rescaled = sorted(sources & set(merged.rescaled)) if len(sources) > 1 else []
    has_signal = isinstance(routes.trigger, SignalTrigger)
    refusals: list[tuple[bool, str]] = [
        (
            any(hasattr(ModuleDict, name) for name in merged.variants),
            f"variants named like an attribute of torch.nn.ModuleDict, among {', '.join(merged.variants)} "
            "(merge them under other names)",
        ),
        (
            reads_more_than_text(model.hf_config.to_dict()) and not images,
            f"{merged.base_architecture}, which reads more than text (of such models it serves "
            f"{', '.join(VISION_ARCHITECTURES)}; serve one variant's own checkpoint)",
        ),
        (
            images and not one_embedding,
            "a vision model whose variants have different embeddings, which vLLM asks for before the plan of "
            "a pass is known (leave the embedding out of quantising in every variant)",
        ),
        (
            images and method is not None,
            "speculative decoding for vision models (drop --speculative-config)",
        ),
        (
            multimodal is not None and multimodal.mm_encoder_only,
            "a server that only reads images (drop --mm-encoder-only)",
        ),
        (images and vllm_config.lora_config is not None, "LoRA for vision models (drop --enable-lora)"),
        (
            bool(rescaled) and vllm_config.lora_config is not None,
            "LoRA for variants whose layers take scaled inputs beside others that take them as they are "
            f"({', '.join(rescaled)} against {next(iter(merged.variants))}; SmoothQuant, AWQ and rotations "
            "do so): an adapter does not fit both (quantise without smoothing, by recipe 'fp8', 'rtn', or "
            "one of your own, or merge the adapter into the 16-bit model before it is quantised)",
        ),
        (parallel.use_ubatching, "microbatches (drop --enable-dbo and --ubatch-size)"),
        (
            parallel.prefill_context_parallel_size > 1,
            "prefill context parallelism, whose ranks see unlike passes (use --tensor-parallel-size)",
        ),
        (
            method not in (None, *SPECULATIVE_METHODS),
            f"speculative method '{method}' (use {', '.join(SPECULATIVE_METHODS)} or none): others read "
            "their draft model from the target's checkpoint, or states that few target classes have",
        ),
        (
            method in DRAFTS_FROM_TARGET and not (one_head and one_embedding),
            f"speculative method '{method}' for variants with different embeddings or lm_heads, of which the "
            "draft model shares one (use 'draft_model' or 'ngram')",
        ),
        (
            vllm_config.offload_config.offload_backend == "prefetch"
            or vllm_config.offload_config.prefetch.offload_group_size > 0,
            "prefetching offload, which takes one model (use --cpu-offload-gb)",
        ),
        (
            model.runner_type != "generate",
            f"the '{model.runner_type}' runner (use --runner generate)",
        ),
        (
            model.enable_prompt_embeds and not one_embedding,
            "prompt embeddings for variants with different embeddings (drop --enable-prompt-embeds)",
        ),
        (
            parallel.enable_eplb,
            "moving experts among ranks (drop --enable-eplb): vLLM would move those of one variant",
        ),
        (
            model.is_moe and parallel.data_parallel_size > 1 and len(routes.plans) > 1,
            "data parallelism for a mixture-of-experts model, whose replicas run expert layers together, "
            "under a policy with several plans (use --tensor-parallel-size, or several servers)",
        ),
        (
            compilation.mode == CompilationMode.STOCK_TORCH_COMPILE,
            "compilation mode STOCK_TORCH_COMPILE, which would freeze one route (use VLLM_COMPILE or NONE)",
        ),
        (
            graphs == CUDAGraphMode.FULL and several_plans_a_size,
            "cudagraph_mode FULL, which replays one graph a size for all phases, under a policy that tells "
            "phases apart (use FULL_AND_PIECEWISE)",
        ),
        (
            is_breakable_cudagraph_enabled() and graphs.has_piecewise_cudagraphs() and several_plans_a_size,
            "breakable CUDA graphs, which replay one graph a size for all phases, under a policy that tells "
            "phases apart (set VLLM_USE_BREAKABLE_CUDAGRAPH=0)",
        ),
        (
            graphs.has_full_cudagraphs() and not one_head,
            f"cudagraph_mode {graphs.name} for variants with different lm_heads (use PIECEWISE)",
        ),
        (
            graphs.has_full_cudagraphs() and routes.has_moments,
            f"cudagraph_mode {graphs.name}, which replays one graph for all decode passes of a size, under a "
            "policy that asks for since_prompt or unsure (use PIECEWISE)",
        ),
        (
            has_signal and parallel.pipeline_parallel_size > 1,
            "pipeline parallelism under a policy whose trigger has a signal, which the last ranks alone "
            "compute (use --tensor-parallel-size)",
        ),
        (
            has_signal and method is not None,
            "speculative decoding under a policy whose trigger has a signal, for which each sequence needs "
            "one row of logits in a pass (drop --speculative-config)",
        ),
    ]
    for refused, what in refusals:
        if refused:
            raise FlexQuantError(f"FlexQuant does not support {what}")
    check_pipeline(vllm_config, merged)


def choose_graph_mode(vllm_config: VllmConfig, merged: MergedConfig, routes: RouteTable) -> None:
    """In the front end: where the user leaves the mode to vLLM, prevent FULL graphs that cannot be served.

    After a FULL replay, for which the model is not called, it would not know whose logits to compute of
    several lm_heads. And of several plans for one size by the moment, a FULL graph holds one.
    """
    from vllm.config import CUDAGraphMode

    cannot_be_full = routes.has_moments or not has_one_head(merged, routes)
    if vllm_config.compilation_config.cudagraph_mode is None and cannot_be_full:
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE


def find_compiled_code_again() -> None:
    """In the front end: on a CPU, let the second start of a model find the code of the first.

    vLLM (0.32) keeps compiled code there in a form that it cannot load ("'function' object has no
    attribute 'finalize_loading'"), so that it compiles at every start, and each plan in a folder of its own.
    Without that form, Inductor keeps the code itself, by what it computes, in one folder for all plans. A
    value that the user has set is left alone. Delete when the oldest supported vLLM loads it.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")


def check_pipeline(vllm_config: VllmConfig, merged: MergedConfig) -> None:
    """Refuse pipeline parallelism for a base model without it, and ranks that would hold no decoder layer."""
    from flexquant.serving.vllm_api import get_pp_indices

    model, ranks = vllm_config.model_config, vllm_config.parallel_config.pipeline_parallel_size
    if ranks == 1:
        return
    if not model.registry.is_pp_supported_model([merged.base_architecture], model):
        raise FlexQuantError(
            f"vLLM has no pipeline parallelism for {merged.base_architecture} (use --tensor-parallel-size)"
        )
    layers = model.hf_text_config.num_hidden_layers
    empty = [rank for rank in range(ranks) if len(range(*get_pp_indices(layers, rank, ranks))) == 0]
    if empty:
        raise FlexQuantError(
            f"pipeline parallelism over {ranks} ranks leaves rank {empty[0]} none of the model's {layers} "
            f"decoder layers (use --pipeline-parallel-size 1 to {layers}, and no zeros in "
            "VLLM_PP_LAYER_PARTITION)"
        )


def has_one_head(merged: MergedConfig, routes: RouteTable) -> bool:
    """Whether all plans end in the same lm_head; a derived variant has its own if that may be quantised."""
    last = {plan.layers[-1] for plan in routes.plans}
    if len(last) == 1:
        return True
    sources = {routes.source(variant) for variant in last}
    if len(sources) > 1 and "lm_head" not in merged.shared_modules:
        return False
    configs = [merged.variants[source].quantization_config for source in sources]
    is_16_bit = all(any("lm_head" in name for name in config.get("ignore") or ()) for config in configs)
    return is_16_bit or not last & routes.derived.keys()


def has_one_embedding(merged: MergedConfig, routes: RouteTable) -> bool:
    """Whether all plans begin with the same embedding."""
    sources = {routes.source(plan.layers[-1]) for plan in routes.plans}
    return len(sources) == 1 or any(module.endswith("embed_tokens") for module in merged.shared_modules)


def tokens_per_sequence(vllm_config: VllmConfig) -> int:
    """Tokens that one sequence contributes to a decode pass: 1, plus the speculated ones."""
    speculative = vllm_config.speculative_config
    return 1 + (speculative.num_speculative_tokens if speculative is not None else 0)


def max_decode_tokens(vllm_config: VllmConfig) -> int:
    """Most tokens that a decode pass can hold, padding to the size of a CUDA graph included.

    Where decoding sequences have several tokens, vLLM's V1 runner rounds the sizes up to a multiple of those.
    """
    one = tokens_per_sequence(vllm_config)
    most = vllm_config.scheduler_config.max_num_seqs * one
    sizes = vllm_config.compilation_config.cudagraph_capture_sizes or []
    as_given = min((size for size in sizes if size >= most), default=most)
    rounded = min((-(-size // one) * one for size in sizes if -(-size // one) * one >= most), default=most)
    return max(as_given, rounded)


def build_routes(vllm_config: VllmConfig, merged: MergedConfig, policy: Policy) -> RouteTable:
    """Return the table of plans that this server will use.

    Raises :class:`FlexQuantError` for a policy that does not fit the checkpoint or the device.
    """
    table = build_route_table(
        policy,
        variants=list(merged.variants),
        num_layers=vllm_config.model_config.hf_text_config.num_hidden_layers,
        max_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        mixable=merged.mixable_groups,
        tokens_per_sequence=tokens_per_sequence(vllm_config),
        max_decode_tokens=max_decode_tokens(vllm_config),
    )
    for variant, derivation in policy.derived.items():
        check_derivable(variant, derivation, merged.variants[derivation.source])
    return table


def check_derivable(name: str, derivation: Derivation, source: Variant) -> None:
    """Refuse a derived variant whose source has other weights than W4A8's, or that this device cannot run."""
    from flexquant.serving.w4a8 import check_signs, find_kernel, group_problem

    groups = source.quantization_config["config_groups"].values()
    weights = [group.get("weights") or {} for group in groups if not group.get("input_activations")]
    integers = [w for w in weights if w.get("type", "int") == "int"]  # layers of others stay as they are
    problems = [group_problem(w, derivation.activations) for w in integers]
    if not problems or any(problems):
        problem = next(filter(None, problems), "which has no symmetric INT4 weights")
        raise FlexQuantError(
            f"{derivation.place} derives '{name}' from '{derivation.source}', {problem}; derive it from a "
            "W4A16 variant with symmetric INT4 weights in groups"
        )
    find_kernel(derivation.activations)
    if source.negative_scales:
        check_signs(derivation.activations, f"variant '{derivation.source}'")
