# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Collect what one rank serves and has counted, for ``GET /flexquant``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexquant import __version__
from flexquant.checkpoint.model_config import JsonObject
from flexquant.policy.schema import PHASES
from flexquant.serving.worker.linear_kernels import kernel_names

if TYPE_CHECKING:
    from flexquant.serving.worker.model import FlexQuantForCausalLM


def status_of(model: FlexQuantForCausalLM) -> JsonObject:
    """Return bytes and kernels by variant, routes by phase, and counters, as JSON-able data.

    ``counted`` is None if another rank counts, ``last_pass`` is None before the first pass.
    """
    return {
        "flexquant": __version__,
        "architecture": model.merged.base_architecture,
        "policy": model.policy.described(),
        "plans": {plan.name: list(plan.layers) for plan in model.routes.plans},
        "routes": {
            phase: [
                {"min_tokens": row.min_tokens, "max_tokens": row.max_tokens, "plan": row.plan.name}
                | ({"moment": span.name} if span.name else {})
                for span in model.routes.spans(phase)
                for row in model.routes.intervals(phase, span.moment)
            ]
            for phase in PHASES
        },
        "kernels": {name: kernel_names(variant) for name, variant in model.variants.items()},
        "weight_bytes": model.weight_bytes,
        "weight_bytes_by_layers": model.weight_bytes_by_layers,
        "last_pass": model.records.last_pass(),
        "counted": model.records.counted(),
    }
