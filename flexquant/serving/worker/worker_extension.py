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

if TYPE_CHECKING:
    from collections.abc import Container

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

    def flexquant_follow_requests(self: ServingWorker) -> None:
        """From the next pass on, remember which plans serve each request.

        The V1 runner holds the requests of the pass that it prepares; for the V2 runner,
        :func:`observed_model_state` names them. Both hold the requests that have not ended, V2 without
        preempted ones.
        """
        model, runner = self.get_model(), self.model_runner
        under_way: Container[str]
        if hasattr(runner, "req_states"):
            model.observer.request_names = tuple
            under_way = runner.req_states.req_id_to_index
        else:
            model.observer.request_names = lambda: runner.input_batch.req_ids
            under_way = runner.requests
        model.records.requests.under_way = lambda: under_way

    def flexquant_requests(self: ServingWorker, response: str) -> list[JsonObject]:
        """Return the requests that a response answers (:meth:`RequestPlans.find`)."""
        return self.get_model().records.requests.find(response)

    def flexquant_tokens(self: ServingWorker, requests: list[str]) -> dict[str, dict[str, int]]:
        """Return which plan computed how many tokens of each request (:meth:`RequestPlans.tokens`)."""
        return self.get_model().records.requests.tokens(requests)

    def flexquant_change_policy(
        self: ServingWorker,
        name: str,
        document: JsonObject,
        dry_run: bool,
        seen: list[str] | None = None,
        change: str = "",
    ) -> JsonObject:
        """Change the policy, as :meth:`LivePolicy.change` does; ``dry_run`` only returns what would change.

        If the policy cannot be taken, ``{"refused": reason}`` is returned.
        """
        try:
            runner = None if dry_run else self.model_runner
            return self.get_model().live_policy.change(name, document, runner, seen, change)
        except FlexQuantError as e:
            return {"refused": str(e)}

    def flexquant_restore_policy(self: ServingWorker, change: str) -> JsonObject:
        """Undo a change that other engines have not taken (:meth:`LivePolicy.restore`).

        If that is not possible, ``{"refused": reason}`` is returned.
        """
        try:
            self.get_model().live_policy.restore(change, self.model_runner)
        except FlexQuantError as e:
            return {"refused": str(e)}
        return {}


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
