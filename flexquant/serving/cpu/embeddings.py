# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Free packed embeddings on a CPU: vLLM packs every embedding, even those that are only looked up.

In a tied model it packs the same weight twice, once for the embedding and once for the lm_head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.platforms import current_platform

from flexquant.serving.vllm_api import ParallelLMHead, VocabParallelEmbedding
from flexquant.serving.worker.weight_memory import packed_for_cpu


def multiplied(model: nn.Module) -> list[VocabParallelEmbedding]:
    """Return the modules that compute logits: a model's lm_head, or its embedding if it has none."""
    embeddings = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    return [module for module in embeddings if isinstance(module, ParallelLMHead)] or embeddings


def unpack_the_looked_up(model: nn.Module) -> None:
    """Free the packed copies of embeddings that compute no logits."""
    heads = multiplied(model)
    embeddings: list[Any] = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding)]
    for embedding in embeddings:
        if embedding not in heads and hasattr(embedding, "cpu_linear"):
            embedding.cpu_linear = torch.nn.functional.linear


def to_be_packed(model: nn.Module) -> list[VocabParallelEmbedding]:
    """Return the embeddings, of a model without weights, that this machine will keep a packed copy of."""
    if not current_platform.is_cpu():
        return []
    return [module for module in multiplied(model) if not hasattr(module, "scheme") and _is_packed(module)]


def _is_packed(embedding: Any) -> bool:
    """Whether vLLM packs an embedding on this CPU, tried on a small one of the same dtype."""
    small = nn.Module()
    small.weight = nn.Parameter(torch.zeros(64, 64, dtype=embedding.weight.dtype), requires_grad=False)
    embedding.quant_method.process_weights_after_loading(small)
    return any(True for _ in packed_for_cpu(small))
