# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Change the policy of a serving model, on all ranks of its engine or on none.

The policy can use the decoder layers that were loaded of each variant at the start; if plans are compiled, it
can use only those plans. No pass runs between two steps of the engine, so the new routes apply from one pass
to the next. The KV cache stays, as all variants read it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol

from vllm.logger import init_logger

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.module_names import describe_ranges
from flexquant.errors import FlexQuantError
from flexquant.policy.routes import route_changes
from flexquant.serving.config import clip_to_server
from flexquant.serving.options import ServedPolicy
from flexquant.serving.worker.plan_views import decoder_path, is_compiled
from flexquant.serving.worker.ranks import on_all_ranks

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

    from flexquant.checkpoint.merged_config import MergedConfig
    from flexquant.policy.plans import Plan
    from flexquant.policy.routes import RouteTable
    from flexquant.policy.rules import Derivation
    from flexquant.serving.worker.forward_pass import PassObserver
    from flexquant.serving.worker.graphs import PlanGraphs, Runner
    from flexquant.serving.worker.pass_records import PassRecords

logger = init_logger("vllm.flexquant.live_policy")


class RoutedModel(Protocol):
    """What a change of policy needs of the serving model."""

    merged: MergedConfig
    policy: ServedPolicy
    observer: PassObserver
    records: PassRecords

    @property
    def routes(self) -> RouteTable: ...


class LivePolicy:
    """One rank's part in the changes of its engine's policy."""

    def __init__(
        self,
        model: RoutedModel,
        vllm_config: VllmConfig,
        plans: dict[str, nn.Module],
        graphs: PlanGraphs,
        build_plan: Callable[[Plan], nn.Module],
    ) -> None:
        """Prepare for changes; ``build_plan`` makes plans of later policies, which are added to ``plans``."""
        self._model = model
        self._vllm_config = vllm_config
        self._plans = plans
        self._graphs = graphs
        self._build_plan = build_plan
        self._loaded = model.routes
        """The first routes, which determine the layers that were loaded of each variant."""

    def change(
        self, policy: ServedPolicy, runner: Runner | None, seen: Collection[str] | None = None
    ) -> JsonObject:
        """Route by another policy from the next pass on; return what that changes.

        The front end has resolved ``policy`` for this server. ``seen`` holds digests of the policies that it
        may replace; None: any. No pass may be running. ``runner``, vLLM's model runner, captures missing CUDA
        graphs; None only returns what would change. Raises :class:`FlexQuantError`, and changes nothing, if
        the model cannot take the policy on some rank.
        """

        def check() -> tuple[ServedPolicy, JsonObject]:
            check_seen(before, seen, policy.name)
            after = clip_to_server(self._vllm_config, self._model.merged, policy)
            if not after.routes.ignores_phase():
                self._model.observer.check_phases()
            compiles = any(
                is_compiled(plan.get_submodule(decoder_path(plan))) for plan in self._plans.values()
            )
            check_change(
                after,
                layers=self._loaded.layers,
                derived=self._loaded.derived,
                compiled_plans=list(self._plans) if compiles else None,
            )
            captures = check_capture(self._vllm_config, self._graphs, after)
            return after, describe_change(before, after, captures=captures)

        before = self._model.policy
        after, told = on_all_ranks(check)
        if runner is not None:
            self._take(after, runner)
        return told

    def _take(self, after: ServedPolicy, runner: Runner) -> None:
        """Route by a policy; ranks agree after every step that can fail, and no later step can."""
        before = self._model.policy

        def build_missing() -> dict[str, nn.Module]:
            self._model.observer.settle()
            missing = [plan for plan in after.routes.plans if plan.name not in self._plans]
            return {plan.name: self._build_plan(plan) for plan in missing}

        self._plans |= on_all_ranks(build_missing)
        self._model.policy = after
        if not self._graphs.fit(after.routes):
            self._capture_again(runner, before)
        logger.info("FlexQuant: policy %s instead of %s", after.name, before.name)
        try:
            self._model.records.announce_policy(after)
        except Exception:
            logger.exception("policy %s is served, but this rank could not note that", after.name)

    def _capture_again(self, runner: Runner, before: ServedPolicy) -> None:
        """Capture CUDA graphs for the policy; if a rank fails, all return to the policy ``before``."""

        def capture() -> None:
            self._graphs.capture_again(runner, self._vllm_config)

        pieces = self._graphs.pieces()
        with self._model.observer.capturing():
            try:
                on_all_ranks(capture)
                return
            except FlexQuantError as e:
                failure = e
            name, self._model.policy = self._model.policy.name, before
            self._graphs.drop_pieces(but=pieces)
            try:
                on_all_ranks(capture)
                served = "is served as before"
            except FlexQuantError as e:
                self._graphs.do_without(runner)
                served = (
                    f"is served without CUDA graphs, since its own could not be captured again ({e}); start "
                    "the server anew to have them back"
                )
        raise FlexQuantError(
            f"the CUDA graphs of {name} could not be captured on every rank ({failure}); {before.name} "
            f"{served}"
        ) from failure


def check_seen(before: ServedPolicy, seen: Collection[str] | None, name: str) -> None:
    """Raise :class:`FlexQuantError` if the policy ``before`` has changed since the caller saw it.

    ``seen`` are the digests that the caller has seen; None: the policy ``name`` may replace any policy.
    """
    if seen is not None and before.digest not in seen:
        raise FlexQuantError(
            f"the server took {before.name} while {name} was being checked; look at GET /flexquant, and "
            f"apply {name} again"
        )


def check_change(
    after: ServedPolicy,
    *,
    layers: Mapping[str, Collection[int]],
    derived: Mapping[str, Derivation],
    compiled_plans: Collection[str] | None,
) -> None:
    """Raise :class:`FlexQuantError` if a policy needs layers, variants or plans that a serving model lacks.

    ``layers`` are the loaded layers of each variant, ``derived`` the derived variants. ``compiled_plans`` are
    the names of the compiled plans; None if the model is not compiled.
    """
    needed = after.routes.layers
    if missing := sorted(needed.keys() - layers.keys()):
        raise FlexQuantError(
            f"{after.name} uses {' and '.join(missing)}, but the server has loaded {', '.join(layers)}; "
            "take a policy that uses these alone, or start a server with one that uses all of them"
        )
    for name, numbers in needed.items():
        if absent := numbers - set(layers[name]):
            raise FlexQuantError(
                f"{after.name} uses layers {describe_ranges(absent)} of {name}, but the server has loaded "
                f"its layers {describe_ranges(layers[name])} alone; take a policy that uses no others of it, "
                "or start a server with one that uses them all"
            )
    for name in sorted(needed):
        if after.routes.derived.get(name) != derived.get(name):
            raise FlexQuantError(
                f"{after.name} derives {name} otherwise than the policy that the server was started with; "
                "derive it in the same way, or start a server with this policy"
            )
    if compiled_plans is None:
        return
    unknown = [plan.name for plan in after.routes.plans if plan.name not in compiled_plans]
    if unknown:
        compiled = ", ".join(compiled_plans)
        raise FlexQuantError(
            f"{after.name} has the plan {unknown[0]}, but the server has compiled {compiled}, and "
            "compiles no more; use these alone, or start a server with this policy"
        )


def check_capture(vllm_config: VllmConfig, graphs: PlanGraphs, after: ServedPolicy) -> bool:
    """Return whether CUDA graphs have to be captured for a policy; raise FlexQuantError if they cannot be."""
    if graphs.fit(after.routes):
        return False
    for asked, what in (
        (vllm_config.speculative_config, "speculative decoding"),
        (vllm_config.kv_transfer_config, "a KV connector"),
    ):
        if asked is not None:
            raise FlexQuantError(
                f"{after.name} needs other CUDA graphs, and with {what} they are captured at the start only; "
                "start a server with this policy"
            )
    return True


def describe_change(before: ServedPolicy, after: ServedPolicy, *, captures: bool) -> JsonObject:
    """Describe a change as JSON-able data.

    It has both policies, whether CUDA graphs are captured, and in ``routes`` the passes that get another
    plan.
    """
    return {
        "before": before.described(),
        "after": after.described(),
        "captures_graphs": captures,
        "routes": [asdict(change) for change in route_changes(before.routes, after.routes)],
    }
