# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""From vLLM's configuration and a policy to the route table, and what cannot be served is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexquant.checkpoint.merged_config import MergedConfig, Variant
from flexquant.errors import FlexQuantError
from flexquant.policy.routes import RouteTable, build_route_table
from flexquant.policy.rules import Derivation, Policy

if TYPE_CHECKING:
    from vllm.config import CUDAGraphMode, VllmConfig


def check_supported(vllm_config: VllmConfig, merged: MergedConfig, routes: RouteTable) -> None:
    """Raise :class:`FlexQuantError` if a vLLM feature is asked for that a merged checkpoint cannot have."""
    from vllm.config import CompilationMode, CUDAGraphMode

    from flexquant.serving.vllm_api import is_breakable_cudagraph_enabled

    parallel, compilation = vllm_config.parallel_config, vllm_config.compilation_config
    speculative = vllm_config.speculative_config
    graphs = compilation.cudagraph_mode or CUDAGraphMode.NONE
    used = {routes.source(variant) for plan in routes.plans for variant in plan.layers}
    one_head = len(used) == 1 or "lm_head" in merged.shared_modules
    one_embedding = len(used) == 1 or any(m.endswith("embed_tokens") for m in merged.shared_modules)
    several_plans_a_size = not routes.ignores_phase()
    refusals: list[tuple[bool, str]] = [
        (vllm_config.lora_config is not None, "LoRA (drop --enable-lora)"),
        (getattr(parallel, "enable_dbo", False), "dual-batch overlap (drop --enable-dbo)"),
        (
            speculative is not None and speculative.method != "ngram",
            f"speculative method '{getattr(speculative, 'method', None)}' (use 'ngram' or none)",
        ),
        (
            vllm_config.model_config.runner_type != "generate",
            f"the '{vllm_config.model_config.runner_type}' runner (use --runner generate)",
        ),
        (
            vllm_config.model_config.enable_prompt_embeds and not one_embedding,
            "prompt embeddings for variants with different embeddings (drop --enable-prompt-embeds)",
        ),
        (vllm_config.model_config.is_moe, "mixture-of-experts models (serve one variant's own checkpoint)"),
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
    ]
    for refused, what in refusals:
        if refused:
            raise FlexQuantError(f"FlexQuant does not support {what}")
    check_pipeline(vllm_config, merged)


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
            f"pipeline parallelism over {ranks} ranks leaves rank {empty[0]} none of the model's {layers} decoder "
            f"layers (use --pipeline-parallel-size 1 to {layers}, and no zeros in VLLM_PP_LAYER_PARTITION)"
        )


def tokens_per_sequence(vllm_config: VllmConfig) -> int:
    """Tokens that one sequence contributes to a decode pass: 1, plus the speculated ones."""
    speculative = vllm_config.speculative_config
    return 1 + (speculative.num_speculative_tokens if speculative is not None else 0)


def max_decode_tokens(vllm_config: VllmConfig) -> int:
    """Most tokens that a decode pass can hold, padding to the size of a CUDA graph included."""
    most = vllm_config.scheduler_config.max_num_seqs * tokens_per_sequence(vllm_config)
    sizes = vllm_config.compilation_config.cudagraph_capture_sizes or []
    return min((size for size in sizes if size >= most), default=most)


def last_graph(vllm_config: VllmConfig) -> tuple[CUDAGraphMode, int] | None:
    """Mode and tokens of the CUDA graph that vLLM captures last: the smallest, FULL ones after the others."""
    from vllm.config import CUDAGraphMode

    compilation = vllm_config.compilation_config
    mode, sizes = compilation.cudagraph_mode, compilation.cudagraph_capture_sizes
    if not mode or not sizes:
        return None
    if not mode.has_full_cudagraphs():
        return CUDAGraphMode.PIECEWISE, min(sizes)
    one = tokens_per_sequence(vllm_config)
    return CUDAGraphMode.FULL, -(-min(sizes) // one) * one


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
    """Refuse a derived variant whose source has no INT4 layers, or for which this device has no kernel."""
    from flexquant.serving.w4a8 import find_kernel

    weights = [group.get("weights") or {} for group in source.quantization_config["config_groups"].values()]
    if not any(w.get("num_bits") == 4 and w.get("type") == "int" and w.get("symmetric") for w in weights):
        raise FlexQuantError(
            f"{derivation.place} derives '{name}' from '{derivation.source}', which has no symmetric INT4 "
            "weights; derive it from a W4A16 variant"
        )
    find_kernel(derivation.activations)
