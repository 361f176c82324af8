# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What one rank serves and has counted, for ``GET /flexquant``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexquant import __version__
from flexquant.policy.rules import PHASES
from flexquant.serving.linear_kernels import kernel_name
from flexquant.serving.vllm_api import LinearBase

if TYPE_CHECKING:
    from flexquant.serving.model import FlexQuantForCausalLM


def status_of(model: FlexQuantForCausalLM) -> dict[str, Any]:
    """Return bytes and kernels by variant, routes by phase, and counters, as data that JSON can hold.

    ``counted`` is None where another rank counts, ``last_pass`` before the first pass.
    """
    kernels = {
        name: sorted({kernel_name(m) for m in variant.modules() if isinstance(m, LinearBase)})
        for name, variant in model.variants.items()
    }
    return {
        "flexquant": __version__,
        "architecture": model.merged.base_architecture,
        "policy": model.policy.described(),
        "plans": {plan.name: list(plan.layers) for plan in model.routes.plans},
        "routes": {
            phase: [
                {"min_tokens": row.min_tokens, "max_tokens": row.max_tokens, "plan": row.plan.name}
                for row in model.routes.intervals(phase)
            ]
            for phase in PHASES
        },
        "kernels": kernels,
        "weight_bytes": model.weight_bytes,
        "last_pass": model.records.last_pass(),
        "counted": model.records.counted(),
    }
