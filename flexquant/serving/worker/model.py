# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Define ``FlexQuantForCausalLM``, the model class that vLLM builds for a merged checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger

from flexquant import __version__
from flexquant.checkpoint.weight_bytes import BytesByRange, describe_bytes
from flexquant.errors import FlexQuantError
from flexquant.policy.plans import Plan
from flexquant.policy.routes import RouteTable
from flexquant.serving.config import ServedPolicy, clip_to_server, merged_of
from flexquant.serving.draft_heads import build_heads_as_stored
from flexquant.serving.kernels.cpu_kernels import provide_cpu_kernels
from flexquant.serving.vllm_api import (
    AttentionLayerBase,
    IntermediateTensors,
    SupportsEagle,
    SupportsEagle3,
    SupportsLoRA,
    SupportsPP,
    get_forward_context,
)
from flexquant.serving.worker.adapters import offer_to_adapters, share_adapters, tell_devices
from flexquant.serving.worker.forward_pass import Pass, PassObserver, PassState, observed_model_state
from flexquant.serving.worker.graphs import PlanGraphs
from flexquant.serving.worker.layers_by_name import HybridModel
from flexquant.serving.worker.one_copy import make_ready
from flexquant.serving.worker.pass_records import PassRecords
from flexquant.serving.worker.plan_views import build_plan
from flexquant.serving.worker.ranks import check_ranks_agree
from flexquant.serving.worker.variants import build_variants
from flexquant.serving.worker.weight_memory import WeightMemory, unpack_the_looked_up
from flexquant.serving.worker.weights import VariantLoader

if TYPE_CHECKING:
    from flexquant.serving.vllm_api import LoRAModelManager

logger = init_logger("vllm.flexquant.model")

Output = torch.Tensor | IntermediateTensors | tuple[torch.Tensor, list[torch.Tensor]]
"""Output of a forward pass: hidden states [tokens, hidden], with EAGLE-3 also those that its draft reads.

On all pipeline-parallel ranks but the last, it is what the next rank takes as ``intermediate_tensors``.
"""


class FlexQuantForCausalLM(HybridModel, nn.Module, SupportsPP, SupportsEagle, SupportsEagle3, SupportsLoRA):
    """Several variants of a causal LM over one KV cache; every pass takes one plan, the same on all ranks."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self.merged = merged_of(vllm_config.model_config)
        self.policy = clip_to_server(vllm_config, self.merged, ServedPolicy.from_vllm(vllm_config))
        check_ranks_agree(self.routes, self.config.quantization_config)
        self.vllm_config = vllm_config
        self.first_routes = self.routes
        """The routes at the start; they alone decide which layers and plans are loaded."""
        self._build_variants(prefix)
        self._observe_passes()
        self._build_plans()
        build_heads_as_stored(vllm_config, type(next(iter(self.variants.values()))))
        self.graphs = PlanGraphs()
        self.weight_bytes: dict[str, int] = {}
        """Variant -> bytes of its weights as kernels keep them; known once all are loaded."""
        self.weight_bytes_by_layers: BytesByRange = {}
        # vLLM 0.26 does not call the model's process_weights_after_loading.
        self._until_first_pass = self.register_forward_pre_hook(lambda *_: self._announce())

    def _build_variants(self, prefix: str) -> None:
        """Build the variants that plans need, with the loader of their weights."""
        provide_cpu_kernels()
        routes, vllm_config = self.routes, self.vllm_config
        variants = build_variants(vllm_config, self.merged, routes, prefix)
        self.variants = nn.ModuleDict(variants)
        stored = {name: variant for name, variant in variants.items() if routes.has_weights(name)}
        has_adapters = vllm_config.lora_config is not None
        self._loader = VariantLoader(stored, self.merged, routes, must_be_unsmoothed=has_adapters)
        self._memory: WeightMemory | None = WeightMemory(variants)
        # What pipeline-parallel ranks pass on has the same shape in all variants.
        if make_empty := getattr(next(iter(variants.values())), "make_empty_intermediate_tensors", None):
            self.make_empty_intermediate_tensors = make_empty

    def _observe_passes(self) -> None:
        """Observe the attention layers of the variants, and record the passes."""
        self.records = PassRecords(self.vllm_config)
        self.observer = PassObserver(
            self.routes.tokens_per_sequence, began=self.records.clock.begin, replayed=self._replayed
        )
        registered = self.vllm_config.compilation_config.static_forward_context.items()
        self.observer.observe({n: one for n, one in registered if isinstance(one, AttentionLayerBase)})
        if not self.routes.ignores_phase():
            self.observer.check_phases()

    def _build_plans(self) -> None:
        self._aux_layers: tuple[int, ...] | None = None
        """Layers that EAGLE-3 reads, as vLLM set them; plans that are built later get them too."""
        # Use a plain dict: plans are views, and vLLM must not see their weights a second time.
        self.plans: dict[str, Any] = {plan.name: self.build_plan(plan) for plan in self.routes.plans}
        self._last_plan = self.routes.plans[0].name
        self._lora_manager: LoRAModelManager | None = None
        if self.vllm_config.lora_config is not None:
            offer_to_adapters(self, self._any_plan)

    def build_plan(self, plan: Plan) -> nn.Module:
        """Return a plan as a view over the variants."""
        built = build_plan(dict(self.variants.items()), plan, self.merged, self.first_routes.derived)
        if self._aux_layers is not None:
            set_aux_layers(built, self._aux_layers)
        return built

    @property
    def _any_plan(self) -> Any:
        """A plan, for what all plans have in common."""
        return self.plans[self.routes.plans[0].name]

    def is_unused_checkpoint_weight(self, name: str) -> bool:
        """Tell vLLM's loader (0.32 on) which tensors are not loaded, so that it can skip their shards."""
        return not self._loader.wants(name)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the variants that were built; return the names of the loaded parameters."""
        return {f"variants.{name}" for name in self._loader.load(weights)}

    @property
    def _do_torchao_reload(self) -> bool:
        """Refuse other weights before vLLM, which asks this first, frees the ones that serve."""
        problem = "FlexQuant's variants take their weights at the start alone"
        raise FlexQuantError(f"{problem}; quantise and merge the new weights, and start a server on them")

    def process_weights_after_loading(self) -> None:
        """Pass vLLM's model-level hook (0.27 on) to the variants that define it, and announce them."""
        for variant in self.variants.values():
            if hook := getattr(variant, "process_weights_after_loading", None):
                hook()
        if self.vllm_config.lora_config is not None:
            tell_devices(dict(self.variants.items()))
        self._announce()

    def _announce(self) -> None:
        """Log what is served, and begin the trace if one is configured; later calls do nothing."""
        if self._memory is None:
            return
        self._until_first_pass.remove()
        for variant in self.variants.values():
            unpack_the_looked_up(variant)
        make_ready(self.variants.values())
        sizes = self.weight_bytes = self._memory.nbytes()
        by_layers = self.weight_bytes_by_layers = self._memory.nbytes_by_range()
        in_16_bit = self._memory.nbytes_in_16_bit(self._any_plan)
        self._memory = None
        plans = ", ".join(
            f"{plan.name} ({', '.join(f'{plan.layers.count(v)} layers {v}' for v in plan.variants)})"
            for plan in self.routes.plans
        )
        told = __version__, self.policy.name, plans, describe_bytes(by_layers)
        message = "FlexQuant %s: policy %s; plans %s; weights %s, in all %.0f %% of 16-bit"
        logger.info(message, *told, 100 * sum(sizes.values()) / in_16_bit)
        self.records.announce_policy(self.policy, weight_bytes=sizes, weight_bytes_in_16_bit=in_16_bit)

    @property
    def routes(self) -> RouteTable:
        return self.policy.routes

    @property
    def model(self) -> nn.Module:
        """A plan's inner model; draft models share its embedding, which all plans have in common."""
        return self._any_plan.model

    @property
    def lm_head(self) -> nn.Module:
        """A plan's lm_head, possibly the embedding; draft models share it, and all plans have the same."""
        return getattr(self._any_plan, "lm_head", None) or self._any_plan.model.embed_tokens

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Have every plan return the hidden states before these decoder layers, which EAGLE-3 reads."""
        for plan in self.plans.values():
            set_aux_layers(plan, layers)
        self._aux_layers = layers

    @property
    def lora_manager(self) -> LoRAModelManager | None:
        """Manager of vLLM's LoRA adapters; vLLM sets it after it has wrapped the layers."""
        return self._lora_manager

    @lora_manager.setter
    def lora_manager(self, manager: LoRAModelManager | None) -> None:
        if manager is not None:
            share_adapters(manager)
        self._lora_manager = manager

    def get_model_state_cls(self) -> type:
        """Return the class that prepares the passes of vLLM's V2 runner."""
        return observed_model_state(self.vllm_config, self.observer)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.plans[self._last_plan].embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Output:
        """Run the plan that the policy gives to this pass."""
        inputs = {
            "input_ids": input_ids,
            "positions": positions,
            "intermediate_tensors": intermediate_tensors,
            "inputs_embeds": inputs_embeds,
        }
        tokens = positions.shape[-1]
        context = get_forward_context()
        in_pieces = context.cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE
        forward_pass = self.observer.read(context, tokens)
        state = self.observer.state
        if in_pieces and not state.is_serving:
            reachable = [plan.name for plan in self.routes.reachable(tokens)]
            self.graphs.capture_missing(self.plans, reachable, context, inputs)
        if forward_pass is None:
            any_plan = self.routes.reachable(tokens)[0].name
            return self.plans[any_plan](**inputs) if in_pieces else self._run_all(inputs)
        plan = self.routes.lookup(forward_pass.phase, forward_pass.tokens).name
        if not (in_pieces or state.is_serving):
            if torch.cuda.is_current_stream_capturing():
                self.graphs.note_full(plan, forward_pass.phase, tokens)
            else:
                self._warm_up_others(plan, tokens, inputs)
        if in_pieces:
            output = self.graphs.replay(plan, self.plans[plan], context, inputs)
        else:
            output = self.plans[plan](**inputs)
        if state == PassState.SCHEDULED:  # a GPU computes meanwhile
            self.records.serve(forward_pass, plan, context.cudagraph_runtime_mode)
        vars(self)["_last_plan"] = plan  # Module.__setattr__ looks through all of its parts
        return output

    def _warm_up_others(self, plan: str, tokens: int, inputs: Mapping[str, object]) -> None:
        """During warm-up, run every plan possible at this size, so that all kernels are tuned.

        With data parallelism vLLM's passes also keep engines in step while one serves, so all run one plan.
        """
        if self.vllm_config.parallel_config.data_parallel_size == 1:
            for other in self.routes.reachable(tokens):
                if other.name != plan:
                    self.plans[other.name](**inputs)

    def _replayed(self, forward_pass: Pass) -> None:
        plan = self.routes.lookup(forward_pass.phase, forward_pass.tokens).name
        self.records.serve(forward_pass, plan, CUDAGraphMode.FULL)

    def _run_all(self, inputs: Mapping[str, object]) -> Output:
        """Run every plan in vLLM's profiling run, so that each is compiled and its memory is counted."""
        for name, plan in self.plans.items():
            with self.graphs.compiling(name):
                output = plan(**inputs)
        return output

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Return the logits [tokens, vocabulary] of the last pass, computed by its plan's lm_head."""
        self.records.clock.end()
        logits = self.plans[self._last_plan].compute_logits(hidden_states)
        self.observer.settle()  # counts a replayed pass, whose time is recorded then
        self.records.time()
        return logits


def set_aux_layers(plan: nn.Module, layers: tuple[int, ...]) -> None:
    """Have a plan return the hidden states before these layers; raise FlexQuantError if it cannot."""
    if not isinstance(plan, SupportsEagle3):
        problem = f"vLLM's {type(plan).__name__} does not support EAGLE-3"
        raise FlexQuantError(f"{problem}; use another speculative method")
    plan.set_aux_hidden_state_layers(layers)
