# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""``FlexQuantForCausalLM``: the model class that vLLM builds for a merged checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.sequence import IntermediateTensors

from flexquant import __version__
from flexquant.checkpoint import SHARED_PREFIX, MergedConfig
from flexquant.compat import provide_cpu_int4_kernel
from flexquant.errors import FlexQuantError
from flexquant.memory import bytes_in_16_bit, weight_bytes
from flexquant.plans import build_plan, build_variants
from flexquant.router import Trace, read_pass
from flexquant.serving import ServingOptions, check_supported, load_routes, tokens_per_sequence

logger = init_logger("vllm.flexquant.model")

REQUIRED_PARAMETERS = ("weight", "weight_packed", "weight_scale")
"""Parameters that every checkpoint has; vLLM's schemes also create optional ones (zero points ...)."""


class FlexQuantForCausalLM(nn.Module):
    """Several variants of one causal LM over one KV cache; every forward pass takes one plan."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        provide_cpu_int4_kernel()
        self.config = vllm_config.model_config.hf_config
        self.merged = MergedConfig.from_json(self.config.quantization_config)
        check_supported(vllm_config, self.merged)
        self.policy_name, self.routes = load_routes(vllm_config, self.merged)
        self.tokens_per_sequence = tokens_per_sequence(vllm_config)
        self.options = ServingOptions.from_vllm(vllm_config)

        used = {variant for plan in self.routes.plans for variant in plan.layers}
        names = [name for name in self.merged.variants if name in used]
        self.variants = nn.ModuleDict(build_variants(vllm_config, self.merged, names, prefix))
        # A plain dict: plans are views, and must not show their weights to vLLM a second time.
        self._plans: dict[str, nn.Module] = {
            plan.name: build_plan(dict(self.variants.items()), plan, vllm_config)
            for plan in self.routes.plans
        }
        self._last_plan = next(iter(self._plans.values()))
        self._trace: Trace | None = None

    def is_unused_checkpoint_weight(self, name: str) -> bool:
        """Tell vLLM's loader (0.32 on) which shards it need not open: those of variants not loaded."""
        return not name.startswith((SHARED_PREFIX, *self._prefixes()))

    def _prefixes(self) -> dict[str, str]:
        return {self.merged.variants[name].prefix: name for name in self.variants}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Hand every tensor to its variant's own loader, and shared ones to all that hold them.

        Raises :class:`FlexQuantError` if a tensor is missing. Returns the names of the loaded parameters.
        """
        loaded: dict[str, set[str]] = {name: set() for name in self.variants}
        prefixes = self._prefixes()
        variant: Any

        def prefix_of(item: tuple[str, torch.Tensor]) -> str:
            return item[0].split(".", 1)[0] + "."

        def stripped(run: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
            return ((name.split(".", 1)[1], tensor) for name, tensor in run)

        for prefix, run in groupby(weights, key=prefix_of):
            if prefix == SHARED_PREFIX:
                shared = list(stripped(run))
                for name, variant in self.variants.items():
                    loaded[name] |= self._load_shared(name, variant, shared)
            elif prefix in prefixes:
                variant = self.variants[prefixes[prefix]]
                loaded[prefixes[prefix]] |= variant.load_weights(stripped(run))
        self._check_complete(loaded)
        self._announce()
        return {f"variants.{name}.{parameter}" for name in loaded for parameter in loaded[name]}

    def _load_shared(self, name: str, variant: Any, tensors: list[tuple[str, torch.Tensor]]) -> set[str]:
        """Load shared tensors; a module that the variant shares by reference is loaded by the first."""
        if name != next(iter(self.variants)):
            by_reference = tuple(f"{module}." for module in self.merged.shared_modules)
            tensors = [(key, tensor) for key, tensor in tensors if not key.startswith(by_reference)]
        return variant.load_weights(tensors)

    def _check_complete(self, loaded: dict[str, set[str]]) -> None:
        first = next(iter(self.variants))
        by_reference = tuple(f"{module}." for module in self.merged.shared_modules)
        for name, variant in self.variants.items():
            done = loaded[name] | {p for p in loaded[first] if p.startswith(by_reference)}
            missing = [
                p
                for p, _ in variant.named_parameters()
                if p not in done and p.rsplit(".", 1)[-1] in REQUIRED_PARAMETERS
            ]
            if missing:
                raise FlexQuantError(
                    f"variant '{name}' of the merged checkpoint lacks {len(missing)} tensors, the first for "
                    f"'{missing[0]}'; check it with 'flexquant verify', or merge again"
                )

    def process_weights_after_loading(self) -> None:
        """Forward vLLM's model-level hook (0.32 on) to the variants that define it."""
        for variant in self.variants.values():
            if hook := getattr(variant, "process_weights_after_loading", None):
                hook()

    def _announce(self) -> None:
        sizes = weight_bytes(dict(self.variants.items()))
        in_16_bit = bytes_in_16_bit(next(iter(self.variants.values())))
        header = {
            "flexquant": __version__,
            "policy": self.policy_name,
            "plans": {plan.name: list(plan.layers) for plan in self.routes.plans},
            "weight_bytes": sizes,
            "weight_bytes_in_16_bit": in_16_bit,
        }
        if self.options.trace is not None:
            rank = get_tensor_model_parallel_rank()
            self._trace = Trace(self.options.trace + (f".rank{rank}" if rank else ""), header)
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

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self._last_plan.embed_input_ids(input_ids)  # type: ignore[operator]

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the plan that the policy gives to this pass; return hidden states [tokens, hidden]."""
        inputs = input_ids if input_ids is not None else inputs_embeds
        assert inputs is not None
        forward_pass = read_pass(get_forward_context(), inputs.shape[0], self.tokens_per_sequence)
        if forward_pass is None:
            return self._run_all(input_ids, positions, intermediate_tensors, inputs_embeds)
        plan = self.routes.lookup(forward_pass.phase, forward_pass.tokens)
        if self._trace is not None:
            self._trace.record(forward_pass, plan.name)
        self._last_plan = self._plans[plan.name]
        return self._last_plan(input_ids, positions, intermediate_tensors, inputs_embeds)

    def _run_all(self, *inputs: Any) -> torch.Tensor:
        """A profiling or capture run: compile and capture every plan before the KV cache is sized."""
        for plan in self._plans.values():
            hidden_states = plan(*inputs)
        return hidden_states

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Return logits [tokens, vocabulary] of the last pass, with its plan's lm_head."""
        return self._last_plan.compute_logits(hidden_states)  # type: ignore[operator]
