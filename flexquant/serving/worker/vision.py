# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Serve vision-language models, whose towers, which all variants share, process each image once.

vLLM asks a model's class how images are processed: which processor prepares them, and what stands for an
image in a prompt. So every base architecture has a class of its own here, which answers as the base does;
vLLM finds it by the name that :func:`~flexquant.checkpoint.merged_config.served_architecture` returns.

Everything else is as for text. A pass begins with embeddings, images' included, which vLLM makes before the
pass and its plan are known. Any plan can make them, since towers and embedding exist once: merging ensures
this for the towers, and :mod:`flexquant.serving.config` for the embedding.
"""

from __future__ import annotations

import torch

from flexquant.serving.vllm_api import Idefics3ForConditionalGeneration, SupportsMultiModal
from flexquant.serving.worker.model import FlexQuantForCausalLM

Embeddings = list[torch.Tensor] | torch.Tensor | tuple[torch.Tensor, ...]
"""Embeddings [tokens, hidden] of each image; in a single tensor the first dimension is the images."""


class FlexQuantVisionModel(FlexQuantForCausalLM, SupportsMultiModal):
    """Several variants of one vision-language model over one KV cache, and over one set of towers."""

    def embed_multimodal(self, **images: object) -> Embeddings:
        """Return the embeddings of images that the base model's processor has prepared."""
        return self._plans[self._last_plan].embed_multimodal(**images)

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Embeddings | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return embeddings [tokens, hidden], those of images where ``is_multimodal`` [tokens] is set."""
        return self._plans[self._last_plan].embed_input_ids(
            input_ids, multimodal_embeddings=multimodal_embeddings, is_multimodal=is_multimodal
        )


class FlexQuantIdefics3ForConditionalGeneration(FlexQuantVisionModel):
    """Several variants of Idefics3: a vision tower, a connector, and Llama."""

    _processor_factory = Idefics3ForConditionalGeneration._processor_factory
    get_placeholder_str = Idefics3ForConditionalGeneration.get_placeholder_str
