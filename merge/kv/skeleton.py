# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Run transformers' own model without its matrices: the caller decides what each matrix returns.

The model is built from its config, without memory for weights. Its forward pass runs once to record the
arguments of every decoder layer. From then on layers run one by one with the caller's parameters (norms,
biases, sinks ...), and what a layer writes into its cache is kept.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from threading import get_ident, local
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModel, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.initialization import no_init_weights

from flexquant.checkpoint.built_model import build_config, build_model
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.module_names import STACKS
from flexquant.merge.kv.matrices import Answer, OwnForward, answer_at_random, is_experts, is_linear, random

KEYS, VALUES = "K in the cache", "V in the cache"
CONVOLVED, RECURRENT = "the convolution's state", "the recurrent state"
"""Names of what a layer writes; a convolution's state is written with its inputs of all tokens."""
WITH_HEADS = (KEYS, RECURRENT)
"""What has a part for every head, with the size of the head last."""
TOKENS = 12
TOKENS_WITH_STATES = 48

MatrixForward = Callable[[str, nn.Module, OwnForward, tuple[Any, ...]], Answer]
"""Called with a matrix's name in its layer, module, own forward and arguments; returns its output."""


class Enough(Exception):
    """Raised to end a pass once all is written that the layer writes."""


class Written(DynamicCache):
    """A cache that also keeps the tensors that were written into it."""

    def __init__(self, config: PretrainedConfig, most: int | None = None) -> None:
        """Make an empty cache; ``most`` is the number of tensors after which the pass ends."""
        super().__init__(config=config)
        self.most = most
        self.tensors: list[tuple[str, Tensor]] = []
        """Names and tensors, in the order of writing; K and V are [1, heads, tokens, head size]."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self._keep((KEYS, key_states), (VALUES, value_states))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> Tensor:
        self._keep((CONVOLVED + (f" {state_idx}" if state_idx else ""), conv_states))
        found: Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        return found

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> Tensor:
        self._keep((RECURRENT + (f" {state_idx}" if state_idx else ""), recurrent_states))
        found: Tensor = super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)
        return found

    def _keep(self, *written: tuple[str, Tensor]) -> None:
        self.tensors += written
        if self.most is not None and len(self.tensors) >= self.most:
            raise Enough


def is_state(name: str) -> bool:
    """Whether what a layer writes under this name is a state, which each token changes."""
    return name.startswith((CONVOLVED, RECURRENT))


class Skeleton:
    """The decoder of a model. Threads may run different layers at the same time."""

    def __init__(self, config: JsonObject, stands_in: bool = False) -> None:
        """Build the model of a ``config.json``; raise whatever transformers raises where it cannot."""
        self.stands_in = stands_in
        """Whether it is another model than the sources', whose norms may use their weights differently."""
        self._config: PretrainedConfig = build_config(config).get_text_config()
        self._config._is_quantized = True  # Jamba calls dt_proj then, instead of reading its weight
        with _parameters_on_meta(), no_init_weights():
            self._model: PreTrainedModel = build_model(
                AutoModel, self._config, dtype=torch.float32, attn_implementation="eager"
            )
        self._model.eval()
        self._thread = local()
        self._stack = next((name for name in STACKS if hasattr(self._model, name)), STACKS[0])
        stack: Any = self._model.get_submodule(self._stack)
        self.layers: list[nn.Module] = list(stack)
        inside = {id(module) for layer in self.layers for module in layer.modules()}
        for module in self._model.modules():
            if id(module) not in inside and isinstance(module, (nn.Linear, nn.Embedding)):
                self._ask(module, "")
        self.matrices = [dict(self._find_matrices(layer)) for layer in self.layers]
        """Linears of each layer, and other modules with a matrix, by name in the layer."""
        self.parameters: list[Mapping[str, torch.Size]] = [
            _shapes_beside(layer, found) for layer, found in zip(self.layers, self.matrices, strict=True)
        ]
        """Shapes of what ``run`` takes of each layer: all parameters but weights of Linears and experts."""
        self._calls: list[tuple[tuple[Any, ...], dict[str, object]]] = []
        self._cache = Written(self._config)
        self._written_before: list[int] = []
        """Number of tensors that the cache was given before each layer, and after the last one."""
        states = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self._cache.layers)
        self._tokens = TOKENS_WITH_STATES if states else TOKENS
        self.before_layers: set[str] = set()
        """Modules outside of the layers, without the embeddings, that run before the last layer."""
        self.after_layers: list[str] = []
        """Modules with parameters of their own that run behind the last layer, such as the final norm."""
        self._see_calls()

    def rename(self, layer: int, name: str) -> str:
        """Return the name in transformers' layer of a parameter with this name in the checkpoint's layer."""
        if name in self.parameters[layer] or name.removesuffix(".weight") in self.matrices[layer]:
            return name
        stack = f"{self._stack}.{layer}."
        return rename_source_key(stack + name, self._conversions[0], [])[0].removeprefix(stack)

    def fused_experts(self, layer: int, name: str) -> tuple[str, str] | None:
        """Return the module and parameter that a tensor of all experts is loaded into; None for others."""
        stack = f"{self._stack}.{layer}."
        renamed, _ = rename_source_key(stack + name, *self._conversions)
        holder, _, parameter = renamed.removeprefix(stack).rpartition(".")
        return (holder, parameter) if is_experts(holder) and holder in self.matrices[layer] else None

    def writes(self, layer: int) -> list[str]:
        """Return the names of what a layer writes into its cache, in the order of writing."""
        first, behind = self._written_before[layer : layer + 2]
        return [name for name, _ in self._cache.tensors[first:behind]]

    def run(
        self,
        layer: int,
        parameters: Mapping[str, Tensor],
        answer: MatrixForward,
        hidden: Tensor,
        until_cached: bool = False,
    ) -> tuple[list[tuple[str, Tensor]], Tensor | None]:
        """Run a layer on [1, tokens, hidden]; return its cache and output (None if ``until_cached``)."""
        args, kwargs = self._calls[layer]
        writes = len(self.writes(layer))
        if until_cached and not writes:
            return [], None
        cache = Written(self._config, writes if until_cached else None)

        def own(value: object) -> object:  # layers share caches and mappings, and write into them
            is_written = isinstance(value, MutableMapping)
            return cache if value is self._cache else copy(value) if is_written else value

        given = {key: own(value) for key, value in kwargs.items()}
        if args:
            args = (hidden, *map(own, args[1:]))
        else:
            given["hidden_states"] = hidden
        outer, self._thread.answer = getattr(self._thread, "answer", None), answer
        try:
            out = functional_call(self.layers[layer], dict(parameters), args, given)
        except Enough:
            return cache.tensors, None
        finally:
            self._thread.answer = outer
        return cache.tensors, out if isinstance(out, Tensor) else out[0]

    def run_last(self, parameters: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """Return what the only module behind the layers makes of hidden states, [..., hidden]."""
        (name,) = self.after_layers
        last: Tensor = functional_call(self._model.get_submodule(name), dict(parameters), (hidden,))
        return last

    def hidden(self, layer: int) -> Tensor:
        """Return hidden states for a layer: standard normal, the same at every call."""
        return random(f"layer {layer}", (1, self._tokens, self._config.hidden_size))

    @cached_property
    def _conversions(self) -> tuple[list[WeightRenaming], list[WeightConverter]]:
        """How transformers renames and converts a checkpoint's tensors when it loads them."""
        found = get_model_conversion_mapping(self._model)
        renamings = [change for change in found if isinstance(change, WeightRenaming)]
        return renamings, [change for change in found if isinstance(change, WeightConverter)]

    def _see_calls(self) -> None:
        """Run the model once, with parameters of ones, and record the arguments of every layer."""

        def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]) -> None:
            self._calls.append((args, kwargs))
            self._written_before.append(len(self._cache.tensors))

        def see_outer(name: str) -> Callable[..., None]:
            def seen(module: nn.Module, *_: object) -> None:
                if len(self._calls) < len(self.layers):
                    self.before_layers.add(name)
                elif any(True for _ in module.parameters(recurse=False)):
                    self.after_layers.append(name)

            return seen

        hooks = [layer.register_forward_pre_hook(see, with_kwargs=True) for layer in self.layers]
        for name, module in self._model.named_modules():
            if not name.startswith(f"{self._stack}.") and module is not self._model.get_input_embeddings():
                hooks.append(module.register_forward_pre_hook(see_outer(name)))
        ones = {
            name: torch.ones((), dtype=torch.float32).expand(tensor.shape)
            for name, tensor in self._model.named_parameters()
            if tensor.device.type == "meta" and not is_experts(name.rpartition(".")[0])
        }
        with torch.no_grad():
            tokens = torch.arange(self._tokens)[None]
            kwargs = {"input_ids": tokens, "past_key_values": self._cache, "use_cache": True}
            functional_call(self._model, ones, kwargs=kwargs)
        self._written_before.append(len(self._cache.tensors))
        for hook in hooks:
            hook.remove()
        if len(self._calls) != len(self.layers):
            raise ValueError(f"{len(self.layers)} layers are called {len(self._calls)} times")

    def _find_matrices(self, layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        experts: list[str] = []
        for name, module in layer.named_modules():
            if any(name.startswith(f"{inside}.") for inside in experts):
                continue
            own = dict(module.named_parameters(recurse=False))
            if is_experts(name) and any(p.ndim == 3 for p in own.values()):
                experts.append(name)
            elif "weight" not in own or own["weight"].ndim != 2 or "Norm" in type(module).__name__:
                continue  # a norm of several heads also has two dimensions, one row for each head
            self._ask(module, name)
            yield name, module

    def _ask(self, module: nn.Module, name: str) -> None:
        """Replace a matrix's forward: it returns what this thread's pass answers, or random numbers."""
        forward = module.forward

        def asked(*args: object, **kwargs: object) -> Answer:
            answer: MatrixForward = getattr(self._thread, "answer", None) or answer_at_random
            return answer(name, module, forward, (*args, *kwargs.values()))

        module.forward = asked


def _shapes_beside(layer: nn.Module, matrices: Mapping[str, nn.Module]) -> dict[str, torch.Size]:
    apart = {
        f"{name}.{own}"
        for name, matrix in matrices.items()
        for own, _ in matrix.named_parameters()
        if is_experts(name) or (own == "weight" and is_linear(matrix))
    }
    stored = {**dict(layer.named_parameters()), **layer.state_dict()}
    return {name: tensor.shape for name, tensor in stored.items() if name not in apart}


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put parameters on the meta device while a model is built; buffers are computed as usual."""
    building = get_ident()

    def on_meta(_: nn.Module, name: str, parameter: nn.Parameter) -> Any:  # torch's types allow None only
        here = get_ident() == building
        return nn.Parameter(parameter.to("meta"), requires_grad=False) if here else None

    hook = register_module_parameter_registration_hook(on_meta)
    try:
        yield
    finally:
        hook.remove()
