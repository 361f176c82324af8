# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Add methods to vLLM's workers, which can be called by name (``collective_rpc``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from flexquant import __version__
from flexquant.checkpoint.model_config import JsonObject
from flexquant.errors import FlexQuantError
from flexquant.policy.schema import PHASES
from flexquant.serving.kernels.layers import kernel_names
from flexquant.serving.options import ServedPolicy

if TYPE_CHECKING:
    from flexquant.serving.worker.graphs import Runner
    from flexquant.serving.worker.model import FlexQuantForCausalLM


class ServingWorker(Protocol):
    """What the methods need of vLLM's worker, whatever its device and runner."""

    model_runner: Runner

    def get_model(self) -> FlexQuantForCausalLM: ...


class FlexQuantWorker:
    """Methods for vLLM's worker; vLLM adds this class to its bases (``--worker-extension-cls``)."""

    def flexquant_status(self: ServingWorker) -> JsonObject:
        """Return what this rank serves and has counted (:func:`status_of`), for ``GET /flexquant``."""
        return status_of(self.get_model())

    def flexquant_metrics(self: ServingWorker) -> JsonObject | None:
        """Return this rank's counters and weights for ``/metrics``; None if another rank counts."""
        model = self.get_model()
        told = model.records.metrics_data()
        return told and {**told, "weight_bytes_by_layers": model.weight_bytes_by_layers}

    def flexquant_change_policy(
        self: ServingWorker, policy: JsonObject, dry_run: bool, seen: list[str] | None = None
    ) -> JsonObject:
        """Change the policy, as :meth:`LivePolicy.change` does; ``dry_run`` only returns what would change.

        ``policy`` is the data of a :class:`ServedPolicy`. If it cannot be taken, ``{"refused": reason}`` is
        returned.
        """
        try:
            runner = None if dry_run else self.model_runner
            return self.get_model().live_policy.change(ServedPolicy.from_json(policy), runner, seen)
        except FlexQuantError as e:
            return {"refused": str(e)}


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
                for row in model.routes.intervals(phase)
            ]
            for phase in PHASES
        },
        "kernels": {name: kernel_names(variant) for name, variant in model.variants.items()},
        "weight_bytes": model.weight_bytes,
        "weight_bytes_by_layers": model.weight_bytes_by_layers,
        "last_pass": model.records.last_pass(),
        "counted": model.records.counted(),
    }
