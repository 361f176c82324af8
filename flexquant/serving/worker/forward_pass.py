# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Find what each forward pass holds: its phase, tokens and sequences, which decide its plan.

In every step, vLLM's model runners describe the batch to the metadata builders of its attention backends,
with the query lengths on the host. So FlexQuant gives its attention layers a subclass of their own backend,
whose builder reads the lengths there. The description travels with the metadata to its forward pass.

A step that vLLM replays from a FULL graph builds metadata too, but does not call the model. Its description
is left over; the step's logits or the next step, whichever comes first, finds it and reports the replay.

What :class:`PassObserver` holds, by the kind of pass:

    pass                           _stage     next_is_own         _left_over           state
    vLLM's warm-up                 WARM_UP    either              None                 WARM_UP
    the scheduler's                SCHEDULED  False               it, until read()     SCHEDULED
    the scheduler's, replayed      SCHEDULED  False               it, until settle()   as before
    vLLM's own beside them         SCHEDULED  True, or no         None                 IN_STEP
                                              metadata at all
    a capture while requests wait  CAPTURE    either              None                 CAPTURE

The scheduler's first pass, which holds a prompt, ends the warm-up.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from compressed_tensors.utils import patch_attr
from vllm.config import VllmConfig

from flexquant.errors import FlexQuantError
from flexquant.policy.schema import Phase
from flexquant.serving.vllm_api import MambaBase, subclass_attention_backend
from flexquant.serving.worker.layers_by_name import sharers, shares_state

if TYPE_CHECKING:
    from flexquant.serving.vllm_api import (
        AttentionBackend,
        CommonAttentionMetadata,
        ForwardContext,
        InputBatch,
    )

OF_VLLM = re.compile(r"_.*warmup.*|req_\d+_[0-9a-f]+")
"""Matches requests that vLLM's runner makes up; names of users' requests begin with a kind or a number."""


class Pass(NamedTuple):
    """Contents of one forward pass."""

    phase: Phase
    tokens: int
    """Tokens in the pass, padding included."""
    sequences: int
    """Sequences without padding; 0 if the attention backend cannot be observed."""
    max_query_len: int
    """Largest number of tokens of one sequence; 0 if the backend cannot be observed."""
    scheduled_tokens: int
    """Tokens without padding, as vLLM's scheduler asked; 0 if the backend cannot be observed."""


UNKNOWN = Pass("prefill", 0, 0, 0, 0)


def describe_pass(
    query_start_loc: torch.Tensor, max_query_len: int, tokens: int, tokens_per_sequence: int
) -> Pass:
    """Describe a pass of ``tokens`` tokens by the offsets at which the sequences' tokens start.

    ``query_start_loc`` is int32 [sequences + 1], on the host; padding sequences come last and have no tokens.
    A decoding sequence has ``tokens_per_sequence`` tokens: 1, plus any speculated ones.
    """
    starts = query_start_loc.numpy()
    if max_query_len == 1:  # most passes of a server; this takes a few operations rather than a dozen
        sequences = int(starts[-1])
        return Pass("decode", tokens, sequences, 1, sequences)
    lengths = [stop - start for start, stop in pairwise(starts.tolist()) if stop > start]
    longest = max(lengths, default=0)
    phase: Phase = "prefill"
    if longest <= tokens_per_sequence:
        phase = "decode"
    elif min(lengths) <= tokens_per_sequence:
        phase = "mixed"
    return Pass(phase, tokens, len(lengths), longest, sum(lengths))


class PassState(Enum):
    """Whose pass the model runs."""

    WARM_UP = auto()
    """vLLM's own before the scheduler's first: it profiles, tunes kernels or captures CUDA graphs."""
    SCHEDULED = auto()
    """The scheduler's, which computes tokens of requests."""
    IN_STEP = auto()
    """vLLM's own beside the scheduler's: data-parallel engines keep step by them."""
    CAPTURE = auto()
    """vLLM's own while requests wait: it captures CUDA graphs again."""

    @property
    def is_serving(self) -> bool:
        """Whether requests are served, so that nothing may be tuned or captured."""
        return self in (PassState.SCHEDULED, PassState.IN_STEP)


class PassObserver:
    """Observes the passes of one model through the metadata builders of its attention layers."""

    def __init__(
        self,
        tokens_per_sequence: int,
        *,
        began: Callable[[], None] = lambda: None,
        replayed: Callable[[Pass], None] = lambda _: None,
    ) -> None:
        """Observe passes in which a decoding sequence has ``tokens_per_sequence`` tokens.

        ``began`` is called when one of the scheduler's begins, ``replayed`` with each replay of a FULL graph.
        """
        self._tokens_per_sequence = tokens_per_sequence
        self._began = began
        self._replayed = replayed
        self._first_layer: str | None = None
        self._sharers: dict[str, list[str]] = {}
        self._unobserved: str | None = None
        self._left_over: Pass | None = None
        """The scheduler's last pass, until the model is called for it or it is reported as replayed."""
        self._stage = PassState.WARM_UP
        """WARM_UP until the scheduler's first pass, which holds a prompt; then SCHEDULED, or CAPTURE."""
        self.next_is_own = False
        """Whether the pass that vLLM describes next is its own at any stage."""
        self.state = PassState.WARM_UP
        """Whose pass :meth:`read` read last."""

    def observe(self, layers: Mapping[str, Any]) -> None:
        """Give attention layers, by name, an observed backend; call this before vLLM makes their KV cache.

        A layer that keeps its backend elsewhere cannot be observed: :meth:`check_phases` refuses it.
        """
        observed_once = functools.cache(self._observed)
        self._sharers = sharers(layers)
        with_state: str | None = None
        for name, layer in layers.items():
            if (backend := getattr(layer, "attn_backend", None)) is not None:
                layer.attn_backend = observed_once(backend)
                self._first_layer = self._first_layer or name
            elif not isinstance(layer, MambaBase):
                self._unobserved = f"'{name}' ({type(layer).__name__})"
            elif not shares_state(layer):
                observed = observed_once(layer.get_attn_backend())
                vars(layer)["get_attn_backend"] = lambda observed=observed: observed
                with_state = with_state or name
        self._first_layer = self._first_layer or with_state

    def check_phases(self) -> None:
        """Raise :class:`FlexQuantError` if prefill and decode cannot be told apart."""
        if self._unobserved is not None:
            problem = f"layer {self._unobserved} does not say which attention backend it uses, so that"
            advice = "serve a policy whose rules name no phase and no batch size"
            raise FlexQuantError(f"{problem} prefill and decode cannot be told apart; {advice}")

    def read(self, context: ForwardContext, tokens: int) -> Pass | None:
        """Return the pass, of ``tokens`` padded tokens, for which the model is called.

        None in vLLM's profiling runs and some of its capture runs, which have no attention metadata.
        """
        self.state = PassState.IN_STEP if self._stage == PassState.SCHEDULED else self._stage
        metadata: Any = context.attn_metadata
        if not metadata:
            return None
        if self._left_over is not None:
            self.state, self._left_over = PassState.SCHEDULED, None
        described = getattr(metadata.get(self._first_layer), "flexquant_pass", UNKNOWN)
        return described if described.tokens == tokens else described._replace(tokens=tokens)

    def settle(self) -> None:
        """Report the last pass, if it was replayed."""
        if self._left_over is not None:
            replayed, self._left_over = self._left_over, None
            self._replayed(replayed)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Treat passes in the block as vLLM's own, even if waiting requests describe them."""
        self.settle()
        with patch_attr(self, "_stage", PassState.CAPTURE):
            yield

    def _describe(self, common: CommonAttentionMetadata, layer_names: list[str]) -> Pass:
        # A FULL graph's metadata has its padded size; other passes get their padded size in read().
        starts, tokens = common.query_start_loc_cpu, common.num_actual_tokens
        found = describe_pass(starts, common.max_query_len, tokens, self._tokens_per_sequence)
        if self.next_is_own:
            return found
        if self._stage == PassState.WARM_UP and common.is_prefilling is not None:
            holds_prompt = bool(common.is_prefilling.any())  # as far as vLLM reports it
            self._stage = PassState.SCHEDULED if holds_prompt else self._stage
        if self._stage == PassState.SCHEDULED and self._first_layer in layer_names:
            self.settle()
            self._left_over = found
            self._began()
        return found

    def _observed(self, backend: type[AttentionBackend]) -> type[AttentionBackend]:
        observer = self
        builder_class: Any = backend.get_builder_cls()

        class ObservedBuilder(builder_class):
            def __init__(
                self, kv_cache_spec: object, layer_names: list[str], *args: object, **options: object
            ) -> None:
                super().__init__(kv_cache_spec, layer_names, *args, **options)
                self.layer_names = layer_names  # builders of multi-head latent attention do not keep them

            def build(
                self,
                common_prefix_len: int,
                common_attn_metadata: CommonAttentionMetadata,
                *args: object,
                **options: object,
            ) -> object:
                metadata = super().build(common_prefix_len, common_attn_metadata, *args, **options)
                metadata.flexquant_pass = observer._describe(common_attn_metadata, self.layer_names)
                if observer._sharers:
                    self._describe_to_sharers()
                return metadata

            def update_block_table(self, *args: object, **options: object) -> object:
                self._describe_to_sharers()
                return super().update_block_table(*args, **options)

            def _describe_to_sharers(self) -> None:
                """Have vLLM give the metadata to those that share a state too, but make no cache for them."""
                sharing = [name for layer in self.layer_names for name in observer._sharers.get(layer, ())]
                self.layer_names += [name for name in sharing if name not in self.layer_names]

            def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> object:
                with patch_attr(observer, "next_is_own", True):
                    return super().build_for_cudagraph_capture(common_attn_metadata)

        return subclass_attention_backend("FlexQuant", backend, ObservedBuilder)


def observed_model_state(vllm_config: VllmConfig, observer: PassObserver) -> type:
    """Return vLLM's class that prepares the V2 runner's passes, extended to tell ``observer`` of vLLM's own.

    That runner warms up, and keeps data-parallel engines in step, with requests of its own; only their names
    tell them from users' requests. The V1 runner makes up such passes without requests.
    """
    base: Any
    if vllm_config.model_config.is_hybrid:
        from flexquant.serving.vllm_api import MambaHybridModelState as base
    else:
        from flexquant.serving.vllm_api import DefaultModelState as base

    class ObservedModelState(base):
        def prepare_attn(self, input_batch: InputBatch, *args: object, **options: object) -> object:
            observer.next_is_own = any(map(OF_VLLM.fullmatch, input_batch.req_ids))
            return super().prepare_attn(input_batch, *args, **options)

    return ObservedModelState
