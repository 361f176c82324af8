# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""From vLLM's configuration to what is served: options, supported features, the route table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexquant.checkpoint import MergedConfig, Variant
from flexquant.errors import FlexQuantError
from flexquant.policy import DEFAULT_POLICY, Derivation, Policy, load_policy, parse_policy
from flexquant.routes import RouteTable, build_route_table

if TYPE_CHECKING:
    from vllm.config import CUDAGraphMode, VllmConfig

OPTIONS_KEY = "flexquant"


@dataclass(frozen=True)
class ServingOptions:
    """What ``--additional-config '{"flexquant": {...}}'`` may hold."""

    policy: str | None = None
    """Name of a built-in policy or path of a YAML file; None: the checkpoint's, else the default."""
    trace: str | None = None
    """File that receives one JSON line per forward pass (phase, tokens, plan ...); None: no trace."""

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> ServingOptions:
        additional: Any = vllm_config.additional_config or {}
        options = additional.get(OPTIONS_KEY, {})
        allowed = list(cls.__dataclass_fields__)
        if not isinstance(options, dict):
            raise FlexQuantError(
                f"additional-config key '{OPTIONS_KEY}' is {options!r}; give a mapping with keys {allowed}"
            )
        for key, value in options.items():
            if key not in allowed:
                raise FlexQuantError(
                    f"additional-config '{OPTIONS_KEY}' has the unknown key '{key}'; allowed: {allowed}"
                )
            if not isinstance(value, str):
                raise FlexQuantError(f"additional-config '{OPTIONS_KEY}.{key}' is {value!r}; give a string")
        return cls(**options)


def check_supported(vllm_config: VllmConfig, merged: MergedConfig, routes: RouteTable) -> None:
    """Raise :class:`FlexQuantError` if a vLLM feature is asked for that a merged checkpoint cannot have."""
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
    from vllm.config import CompilationMode, CUDAGraphMode

    parallel, compilation = vllm_config.parallel_config, vllm_config.compilation_config
    speculative = vllm_config.speculative_config
    graphs = compilation.cudagraph_mode or CUDAGraphMode.NONE
    one_head = len(merged.variants) == 1 or "lm_head" in merged.shared_modules
    several_plans_a_size = not routes.ignores_phase()
    refusals: list[tuple[bool, str]] = [
        (vllm_config.lora_config is not None, "LoRA (drop --enable-lora)"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism (use --tensor-parallel-size)"),
        (getattr(parallel, "enable_dbo", False), "dual-batch overlap (drop --enable-dbo)"),
        (
            speculative is not None and speculative.method != "ngram",
            f"speculative method '{getattr(speculative, 'method', None)}' (use 'ngram' or none)",
        ),
        (
            vllm_config.model_config.runner_type != "generate",
            f"the '{vllm_config.model_config.runner_type}' runner (use --runner generate)",
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


def tokens_per_sequence(vllm_config: VllmConfig) -> int:
    """Tokens that one sequence contributes to a decode pass: 1, plus the speculated ones."""
    speculative = vllm_config.speculative_config
    return 1 + (speculative.num_speculative_tokens if speculative is not None else 0)


def choose_policy(options: ServingOptions, merged: MergedConfig) -> tuple[str, Policy]:
    """Return the policy's display name and the policy: the option's, the checkpoint's or the default."""
    if options.policy is not None:
        return options.policy, load_policy(options.policy)
    if merged.policy is not None:
        return "stored in the checkpoint", parse_policy(merged.policy, source="the checkpoint's policy")
    return DEFAULT_POLICY, load_policy(DEFAULT_POLICY)


def max_decode_sequences(vllm_config: VllmConfig) -> int:
    """Largest decode batch that a forward pass can hold, padding to a CUDA-graph size included."""
    max_sequences = vllm_config.scheduler_config.max_num_seqs
    sizes = vllm_config.compilation_config.cudagraph_capture_sizes or []
    return min((s for s in sizes if s >= max_sequences), default=max_sequences)


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


def load_routes(vllm_config: VllmConfig, merged: MergedConfig) -> tuple[str, RouteTable]:
    """Return the policy's display name and the table of plans that this server will use.

    Raises :class:`FlexQuantError` for a policy that does not fit the checkpoint or the device.
    """
    name, policy = choose_policy(ServingOptions.from_vllm(vllm_config), merged)
    table = build_route_table(
        policy,
        variants=list(merged.variants),
        num_layers=vllm_config.model_config.hf_text_config.num_hidden_layers,
        max_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        layered_plans_allowed=merged.layered_plans,
        tokens_per_sequence=tokens_per_sequence(vllm_config),
        max_sequences=max_decode_sequences(vllm_config),
    )
    check_distinguishable(table)
    for variant, derivation in policy.derived.items():
        check_derivable(variant, derivation, merged.variants[derivation.source])
    return name, table


def check_derivable(name: str, derivation: Derivation, source: Variant) -> None:
    """Refuse a derived variant whose source has no INT4 layers, or for which this device has no kernel."""
    from flexquant.w4a8 import find_kernel

    weights = [group.get("weights") or {} for group in source.quantization_config["config_groups"].values()]
    if not any(w.get("num_bits") == 4 and w.get("type") == "int" and w.get("symmetric") for w in weights):
        raise FlexQuantError(
            f"{derivation.place} derives '{name}' from '{derivation.source}', which has no symmetric INT4 "
            "weights; derive it from a W4A16 variant"
        )
    find_kernel(derivation.activations)


def check_distinguishable(table: RouteTable) -> None:
    """Refuse a table that needs to tell ``prefill`` from ``mixed`` where that would stall the device."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() and table.intervals("prefill") != table.intervals("mixed"):
        raise FlexQuantError(
            "the policy gives 'prefill' and 'mixed' different plans, which cannot be told apart on "
            f"{current_platform.device_name} without stalling it; give both the same rule"
        )
