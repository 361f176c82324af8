# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Record a worker's passes in the trace, if one is configured, and in the metrics."""

from __future__ import annotations

from typing import Any

from vllm.config import CUDAGraphMode, VllmConfig

from flexquant import __version__
from flexquant.checkpoint.layer_ranges import BytesByRange
from flexquant.checkpoint.model_config import JsonObject
from flexquant.serving.options import ServingOptions
from flexquant.serving.worker.forward_pass import Pass
from flexquant.serving.worker.metrics import PassMetrics, metrics_of_worker
from flexquant.serving.worker.policy_change import ServedPolicy
from flexquant.serving.worker.request_plans import RequestPlans
from flexquant.serving.worker.trace import Trace, trace_file


class PassRecords:
    """The trace and the metrics of one worker; either can be missing."""

    def __init__(self, metrics: PassMetrics | None, trace: Trace | None) -> None:
        self._metrics = metrics
        self._trace = trace
        self._last: tuple[Pass, str, str] | None = None
        self.requests = RequestPlans()

    @classmethod
    def of_worker(cls, vllm_config: VllmConfig) -> PassRecords:
        """Return the records that this worker keeps under the configuration."""
        file, mib = trace_file(vllm_config), ServingOptions.from_vllm(vllm_config).trace_mib
        return cls(metrics_of_worker(vllm_config), Trace(file, mib) if file is not None else None)

    def announce_weights(self, nbytes: BytesByRange) -> None:
        """Publish the bytes of weights by variant and range of layers."""
        if self._metrics is not None:
            self._metrics.announce_weights(nbytes)

    def announce_policy(self, policy: ServedPolicy, **details: Any) -> None:
        """Record the policy that routes passes from now on; ``details`` go into the trace."""
        if self._metrics is not None:
            self._metrics.announce_policy(policy.name, policy.digest)
        if self._trace is not None:
            plans = {plan.name: list(plan.layers) for plan in policy.routes.plans}
            self._trace.begin({"flexquant": __version__, "policy": policy.name, "plans": plans, **details})

    def begin(self) -> None:
        """Note that a pass begins; :meth:`serve` says which."""
        if self._metrics is not None:
            self._metrics.begin_pass()

    def serve(self, forward_pass: Pass, plan: str, graph: CUDAGraphMode, moment: str = "") -> None:
        """Record a pass of vLLM's scheduler.

        ``graph`` is the mode of the CUDA graphs that it runs from, ``moment`` the name of its span of
        moments.
        """
        self._last = (forward_pass, plan, moment)
        if forward_pass.requests is not None:
            self.requests.record(forward_pass.requests, plan, moment)
        if self._trace is not None:
            self._trace.record(forward_pass, plan)
        if self._metrics is not None:
            self._metrics.count_pass(forward_pass, plan, graph)

    def end(self) -> None:
        """Note that the pass that was served last has ended."""
        if self._metrics is not None:
            self._metrics.end_pass()

    def counted(self) -> list[dict[str, str | float]] | None:
        """Return a record for each plan and phase that has run; None if another worker counts."""
        return self._metrics.counted() if self._metrics is not None else None

    def last_pass(self) -> JsonObject | None:
        """Return the last pass and its plan, in the form of the trace; None before the first pass."""
        if self._last is None:
            return None
        forward_pass, plan, moment = self._last
        return {**forward_pass.to_data(), "plan": plan} | ({"moment": moment} if moment else {})
