# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A cache of transformers that keeps what a layer writes into it: keys, values and states."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

KEYS, VALUES = "K in the cache", "V in the cache"
CONVOLVED, RECURRENT = "the convolution's state", "the recurrent state"
"""Names of what a layer writes; a convolution's state is written with its inputs of all tokens."""
WITH_HEADS = (KEYS, RECURRENT)
"""What has a part for every head, with the size of the head last."""


class Enough(Exception):
    """Raised to end a pass once all is written that the layer writes."""


class Written(DynamicCache):
    """A cache that also keeps the tensors that were written into it."""

    def __init__(self, config: PretrainedConfig, most: int | None = None) -> None:
        """Make an empty cache; ``most`` is the number of tensors after which the pass ends."""
        super().__init__(config=config)
        self.most = most
        self.tensors: list[tuple[str, torch.Tensor]] = []
        """Names and tensors, in the order of writing; K and V are [1, heads, tokens, head size]."""

    @property
    def has_states(self) -> bool:
        """Whether a layer of the model carries a state from token to token."""
        return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self.layers)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._keep((KEYS, key_states), (VALUES, value_states))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        self._keep((CONVOLVED + (f" {state_idx}" if state_idx else ""), conv_states))
        found: torch.Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        return found

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        self._keep((RECURRENT + (f" {state_idx}" if state_idx else ""), recurrent_states))
        found: torch.Tensor = super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)
        return found

    def _keep(self, *written: tuple[str, torch.Tensor]) -> None:
        self.tensors += written
        if self.most is not None and len(self.tensors) >= self.most:
            raise Enough


def is_state(name: str) -> bool:
    """Whether what a layer writes under this name is a state, which each token changes."""
    return name.startswith((CONVOLVED, RECURRENT))
