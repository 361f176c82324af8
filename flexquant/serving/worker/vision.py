# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Serve vision-language models, whose towers, which all variants share, process each image once.

vLLM asks a model's class how images are processed: which processor prepares them, and what stands for an
image in a prompt. So every base architecture has a class of its own here, which answers as the base does;
vLLM finds it by the name that :func:`~flexquant.checkpoint.merged_config.served_architecture` returns.

vLLM makes embeddings, images' included, before the pass and its plan are known. Any plan can make them, as
towers (see merging) and embedding (:mod:`flexquant.serving.refusals`) exist once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.models import ModelRegistry

from flexquant.checkpoint.merged_config import VISION_ARCHITECTURES, served_architecture
from flexquant.serving.vllm_api import SupportsMRoPE, SupportsMultiModal, supports_mrope
from flexquant.serving.worker.model import FlexQuantForCausalLM

Embeddings = list[torch.Tensor] | torch.Tensor | tuple[torch.Tensor, ...]
"""Embeddings [tokens, hidden] of each image; in a single tensor the first dimension is the images."""
BESIDE_EMBEDDINGS = ("deepstack_input_embeds", "deepstack_input_embeds_num_tokens")
"""Attributes in which Qwen3-VL's ``embed_input_ids`` leaves features [tokens, hidden] for its first layers.

The forward pass after it reads and clears them. Goes when vLLM hands them to ``forward``.
"""
ANSWERS = ("_processor_factory", "get_placeholder_str", "supports_mm_device_do_normalize")
"""Attributes by which vLLM finds out from a class how images are prepared and named in a conversation."""


class FlexQuantVisionModel(FlexQuantForCausalLM, SupportsMultiModal):
    """Several variants of one vision-language model over one KV cache, and over one set of towers."""

    def _build_variants(self, prefix: str) -> None:
        super()._build_variants(prefix)
        self._share_features(next(iter(self.variants.values())), self.variants.values())

    @staticmethod
    def _share_features(embedder: nn.Module, models: Iterable[nn.Module]) -> None:
        """Have ``models`` read what ``embedder`` leaves beside the embeddings."""
        left = {name: vars(embedder)[name] for name in BESIDE_EMBEDDINGS if name in vars(embedder)}
        for model in models:
            vars(model).update(left)

    def embed_multimodal(self, **images: object) -> Embeddings:
        """Return the embeddings of images that the base model's processor has prepared."""
        return self.plans[self._last_plan].embed_multimodal(**images)

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Embeddings | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return embeddings [tokens, hidden], those of images where ``is_multimodal`` [tokens] is set."""
        embedder = self.plans[self._last_plan]
        embeddings: torch.Tensor = embedder.embed_input_ids(
            input_ids, multimodal_embeddings=multimodal_embeddings, is_multimodal=is_multimodal
        )
        self._share_features(embedder, self.plans.values())
        return embeddings


class WithMRoPE(FlexQuantVisionModel, SupportsMRoPE):
    """A vision model whose tokens have positions in three dimensions."""

    def get_mrope_input_positions(self, *prompt: Any, **named: Any) -> tuple[torch.Tensor, int]:
        """Return the positions [3, tokens] of a prompt, and what is added to them after it."""
        return self.plans[self._last_plan].get_mrope_input_positions(*prompt, **named)


@functools.cache
def class_for(base_architecture: str) -> type[FlexQuantVisionModel]:
    """Return the class that serves variants of ``base_architecture``, and answers vLLM as its class does."""
    base = ModelRegistry.models[base_architecture].load_model_cls()
    parent = WithMRoPE if supports_mrope(base) else FlexQuantVisionModel
    answers = {name: getattr(base, name) for name in ANSWERS if hasattr(base, name)}
    return type(served_architecture(base_architecture), (parent,), {"__module__": __name__, **answers})


def __getattr__(name: str) -> type[FlexQuantVisionModel]:
    for base in VISION_ARCHITECTURES:
        if name == served_architecture(base):
            return class_for(base)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
