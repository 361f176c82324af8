# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Recognise the warm-up passes of vLLM's V2 model runner, which it runs with requests of its own.

Only the requests' names distinguish them from users' requests. The V1 runner warms up without requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from flexquant.serving.worker.forward_pass import PassObserver


def observed_model_state(vllm_config: VllmConfig, observer: PassObserver) -> type:
    """Return vLLM's class that prepares the V2 runner's passes, extended to tell ``observer`` of warm-ups."""
    base: Any
    if vllm_config.model_config.is_hybrid:
        from flexquant.serving.vllm_api import MambaHybridModelState as base
    else:
        from flexquant.serving.vllm_api import DefaultModelState as base

    class ObservedModelState(base):
        def prepare_attn(self, input_batch: Any, *args: Any, **options: Any) -> Any:
            observer.is_warming_up = any(is_of_vllm(name) for name in input_batch.req_ids)
            if observer.request_names is not None:
                observer.request_names = lambda: input_batch.req_ids
            return super().prepare_attn(input_batch, *args, **options)

    return ObservedModelState


def is_of_vllm(request_id: str) -> bool:
    """Whether vLLM's warm-up made a request; names of users' requests begin with a kind or a number."""
    return request_id.startswith("_") and "warmup" in request_id
