# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""``FlexQuantForCausalLM``: the model class that vLLM builds for a merged checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger

from flexquant import __version__
from flexquant.checkpoint.merged_config import MergedConfig
from flexquant.documents.digest import digest_of
from flexquant.errors import FlexQuantError
from flexquant.policy.rules import PHASES
from flexquant.serving.config import build_routes, check_supported, tokens_per_sequence
from flexquant.serving.cpu.kernels import provide_cpu_kernels
from flexquant.serving.forward_pass import Pass, PassObserver
from flexquant.serving.graphs import PlanGraphs
from flexquant.serving.linear_kernels import kernel_name
from flexquant.serving.metrics import metrics_of_worker
from flexquant.serving.model_state import observed_model_state
from flexquant.serving.options import resolved_policy
from flexquant.serving.plan_views import build_plan
from flexquant.serving.ranks import check_ranks_agree
from flexquant.serving.trace import Trace, trace_file
from flexquant.serving.variants import build_variants
from flexquant.serving.vllm_api import (
    IntermediateTensors,
    LinearBase,
    SupportsEagle,
    SupportsEagle3,
    SupportsPP,
    get_forward_context,
)
from flexquant.serving.weight_memory import WeightMemory
from flexquant.serving.weights import VariantLoader

logger = init_logger("vllm.flexquant.model")

Output = torch.Tensor | IntermediateTensors | tuple[torch.Tensor, list[torch.Tensor]]
"""Of a forward pass: hidden states [tokens, hidden], with EAGLE-3 also those that its draft model reads; on
all pipeline-parallel ranks but the last, what the next one takes as ``intermediate_tensors``."""


class FlexQuantForCausalLM(nn.Module, SupportsPP, SupportsEagle, SupportsEagle3):
    """Several variants of one causal LM over one KV cache; every forward pass takes one plan.

    With pipeline parallelism each rank holds its own decoder layers of every variant. All ranks find the same
    route, since vLLM describes a pass to all of them alike.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        provide_cpu_kernels()
        self.config = vllm_config.model_config.hf_config
        self.merged = MergedConfig.from_json(self.config.quantization_config)
        self.policy_name, policy = resolved_policy(vllm_config)
        self._policy_digest = digest_of(policy.document)
        self.routes = build_routes(vllm_config, self.merged, policy)
        check_supported(vllm_config, self.merged, self.routes)
        check_ranks_agree(self.routes, self.config.quantization_config)

        used = {variant for plan in self.routes.plans for variant in plan.layers}
        names = [name for name in (*self.merged.variants, *self.routes.derived) if name in used]
        variants = build_variants(vllm_config, self.merged, names, self.routes.derived, prefix)
        self.variants = nn.ModuleDict(variants)
        self._metrics = metrics_of_worker(vllm_config)
        began = self._metrics.begin_pass if self._metrics is not None else None
        self._observer = PassObserver(tokens_per_sequence(vllm_config), self._replayed, began)
        attention_layers = vllm_config.compilation_config.static_forward_context
        self._observer.observe(attention_layers, phase_matters=not self.routes.ignores_phase())
        self._vllm_config = vllm_config
        self._loader = VariantLoader(variants, self.merged, self.routes.derived)
        # A plain dict: plans are views, and must not show their weights to vLLM a second time.
        self._plans: dict[str, Any] = {
            plan.name: build_plan(variants, plan, self.merged, self.routes.derived)
            for plan in self.routes.plans
        }
        # What pipeline-parallel ranks hand on has the same shape in all variants.
        if make_empty := getattr(next(iter(variants.values())), "make_empty_intermediate_tensors", None):
            self.make_empty_intermediate_tensors = make_empty
        self._last_plan = self.routes.plans[0].name
        mode = vllm_config.compilation_config.cudagraph_mode
        self._graphs = PlanGraphs(has_full=mode is not None and mode.has_full_cudagraphs())
        trace = trace_file(vllm_config)
        self._trace = Trace(trace) if trace is not None else None
        self._memory: WeightMemory | None = WeightMemory(variants)
        self._weight_bytes: dict[str, int] = {}
        # For vLLM 0.26, which does not call the model's process_weights_after_loading.
        self._until_first_pass = self.register_forward_pre_hook(lambda *_: self._announce())

    def is_unused_checkpoint_weight(self, name: str) -> bool:
        """Tell vLLM's loader (0.32 on) which shards it need not open: those of variants not loaded."""
        return not self._loader.wants(name)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the variants that were built; return the names of the loaded parameters."""
        return {f"variants.{name}" for name in self._loader.load(weights)}

    def process_weights_after_loading(self) -> None:
        """Forward vLLM's model-level hook (0.27 on) to the variants that define it, and announce them."""
        for variant in self.variants.values():
            if hook := getattr(variant, "process_weights_after_loading", None):
                hook()
        self._announce()

    def _announce(self) -> None:
        """Log what is served, and begin the trace if one is asked for; later calls do nothing."""
        if self._memory is None:
            return
        self._until_first_pass.remove()
        sizes = self._weight_bytes = self._memory.nbytes()
        in_16_bit = self._memory.nbytes_in_16_bit(next(iter(self.variants)))
        self._memory = None
        logger.info(
            "FlexQuant %s: policy %s; plans %s; weights %s, in all %.0f %% of 16-bit",
            __version__,
            self.policy_name,
            ", ".join(
                f"{plan.name} ({', '.join(f'{plan.layers.count(v)} layers {v}' for v in plan.variants)})"
                for plan in self.routes.plans
            ),
            ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in sizes.items()),
            100 * sum(sizes.values()) / in_16_bit,
        )
        if self._metrics is not None:
            self._metrics.announce(self.policy_name, self._policy_digest, sizes)
        if self._trace is not None:
            self._trace.begin(
                {
                    "flexquant": __version__,
                    "policy": self.policy_name,
                    "plans": {plan.name: list(plan.layers) for plan in self.routes.plans},
                    "weight_bytes": sizes,
                    "weight_bytes_in_16_bit": in_16_bit,
                }
            )

    def status(self) -> dict[str, Any]:
        """Return what this rank serves, and what it has counted: None where another rank counts.

        Bytes and kernels by variant, routes by phase, all of it data that JSON can hold.
        """
        kernels = {
            name: sorted({kernel_name(m) for m in variant.modules() if isinstance(m, LinearBase)})
            for name, variant in self.variants.items()
        }
        return {
            "flexquant": __version__,
            "architecture": self.merged.base_architecture,
            "policy": {"name": self.policy_name, "digest": self._policy_digest},
            "plans": {plan.name: list(plan.layers) for plan in self.routes.plans},
            "routes": {
                phase: [
                    {"min_tokens": row.min_tokens, "max_tokens": row.max_tokens, "plan": row.plan.name}
                    for row in self.routes.intervals(phase)
                ]
                for phase in PHASES
            },
            "kernels": kernels,
            "weight_bytes": self._weight_bytes,
            "counted": self._metrics.counted() if self._metrics is not None else None,
        }

    @property
    def model(self) -> nn.Module:
        """A plan's inner model, whose embedding draft models share: there is one for all plans."""
        return self._plans[self.routes.plans[0].name].model

    @property
    def lm_head(self) -> nn.Module:
        """A plan's lm_head, which draft models share: there is one for all plans."""
        return self._plans[self.routes.plans[0].name].lm_head

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Let every plan return the hidden states before these decoder layers, which EAGLE-3 drafts from."""
        plan: Any
        for plan in self._plans.values():
            if not isinstance(plan, SupportsEagle3):
                raise FlexQuantError(
                    f"vLLM's {type(plan).__name__} does not support EAGLE-3; use another speculative method"
                )
            plan.set_aux_hidden_state_layers(layers)

    def get_model_state_cls(self) -> type:
        """vLLM's V2 runner asks for the class that prepares its passes."""
        return observed_model_state(self._vllm_config, self._observer)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self._plans[self._last_plan].embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Output:
        """Run the plan that the policy gives to this pass."""
        inputs = (input_ids, positions, intermediate_tensors, inputs_embeds)
        tokens = positions.shape[-1]
        context = get_forward_context()
        in_pieces = context.cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE
        forward_pass = self._observer.read(context, tokens)
        if in_pieces and not self._observer.is_serving:
            reachable = [plan.name for plan in self.routes.reachable(tokens)]
            self._graphs.capture_missing(self._plans, reachable, context, inputs, tokens)
        if forward_pass is None:
            any_plan = self.routes.reachable(tokens)[0].name
            return self._plans[any_plan](*inputs) if in_pieces else self._run_all(inputs)
        plan = self.routes.lookup(forward_pass.phase, forward_pass.tokens)
        if not in_pieces:
            self._graphs.watch_full_capture(plan.name, tokens)
        if self._observer.is_serving:
            self._served(forward_pass, context.cudagraph_runtime_mode)
        self._last_plan = plan.name
        if in_pieces:
            return self._graphs.replay(plan.name, self._plans[plan.name], context, inputs)
        return self._plans[plan.name](*inputs)

    def _served(self, forward_pass: Pass, graph: CUDAGraphMode) -> None:
        """Note a pass of vLLM's scheduler, and the mode of the CUDA graphs that it runs from."""
        self._graphs.finish()
        plan = self.routes.lookup(forward_pass.phase, forward_pass.tokens).name
        if self._trace is not None:
            self._trace.record(forward_pass, plan)
        if self._metrics is not None:
            self._metrics.count_pass(forward_pass, plan, graph)

    def _replayed(self, forward_pass: Pass) -> None:
        self._served(forward_pass, CUDAGraphMode.FULL)

    def _run_all(self, inputs: tuple[Any, ...]) -> Output:
        """A profiling run: every plan is compiled, and its memory counted, before the KV cache is sized."""
        for name, plan in self._plans.items():
            with self._graphs.compiling(name):
                output = plan(*inputs)
        return output

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Return logits [tokens, vocabulary] of the last pass, with its plan's lm_head."""
        self._observer.settle()
        if self._metrics is not None:
            self._metrics.end_pass()
        return self._plans[self._last_plan].compute_logits(hidden_states)
