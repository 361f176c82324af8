# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Tell an observer of passes which of them vLLM's V2 runner makes up."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from flexquant.serving.vllm_api import InputBatch
    from flexquant.serving.worker.forward_pass import PassObserver

OF_VLLM = re.compile(r"_.*warmup.*|req_\d+_[0-9a-f]+")
"""Matches requests that vLLM's runner makes up; names of users' requests begin with a kind or a number."""


def observed_model_state(vllm_config: VllmConfig, observer: PassObserver) -> type:
    """Return vLLM's class that prepares the V2 runner's passes, extended to tell ``observer`` of vLLM's own.

    That runner warms up with requests of its own, and keeps data-parallel engines in step with them; only
    their names tell them from users' requests. The V1 runner makes up such passes without requests.
    """
    base: Any
    if vllm_config.model_config.is_hybrid:
        from flexquant.serving.vllm_api import MambaHybridModelState as base
    else:
        from flexquant.serving.vllm_api import DefaultModelState as base

    class ObservedModelState(base):
        def prepare_attn(self, input_batch: InputBatch, *args: object, **options: object) -> object:
            observer.expect(own=any(map(OF_VLLM.fullmatch, input_batch.req_ids)))
            return super().prepare_attn(input_batch, *args, **options)

    return ObservedModelState
