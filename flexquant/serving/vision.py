# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Vision-language models: images are read once, by towers that all variants have in common.

vLLM asks the class of a model how its images are read: which processor prepares them, and what stands for one
in a prompt. So every base architecture has a class of its own here, which answers as the base does; vLLM
finds it by the name that :func:`~flexquant.checkpoint.merged_config.served_architecture` gives.

The rest is as for text. A pass begins with embeddings, those of the images among them, and vLLM makes them
before the pass is known, hence before its plan is. Any plan can be asked for them: towers and embedding exist
once, which merging sees to for the towers, and :mod:`flexquant.serving.config` for the embedding.
"""

from __future__ import annotations

import torch

from flexquant.serving.model import FlexQuantForCausalLM
from flexquant.serving.vllm_api import Idefics3ForConditionalGeneration, SupportsMultiModal

Embeddings = list[torch.Tensor] | torch.Tensor | tuple[torch.Tensor, ...]
"""One for each image [tokens, hidden]; a tensor has one more dimension for the images."""


class FlexQuantVisionModel(FlexQuantForCausalLM, SupportsMultiModal):
    """Several variants of one vision-language model over one KV cache, and over one set of towers."""

    def embed_multimodal(self, **images: object) -> Embeddings:
        """Return the embeddings of images that the base's processor has prepared."""
        return self._plans[self._last_plan].embed_multimodal(**images)

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Embeddings | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return embeddings [tokens, hidden], those of images where ``is_multimodal`` [tokens] says so."""
        return self._plans[self._last_plan].embed_input_ids(
            input_ids, multimodal_embeddings=multimodal_embeddings, is_multimodal=is_multimodal
        )


class FlexQuantIdefics3ForConditionalGeneration(FlexQuantVisionModel):
    """Idefics3: a tower for images, a connector, and Llama."""

    _processor_factory = Idefics3ForConditionalGeneration._processor_factory
    get_placeholder_str = Idefics3ForConditionalGeneration.get_placeholder_str
