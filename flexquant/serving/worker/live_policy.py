# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Keep all ranks on one policy: compare it at the start, change it on all ranks of an engine or on none.

On one machine the ranks always agree at the start, since the front end resolves the policy for all workers.
With several machines, each has a front end of its own, which reads its own files.

A later policy can use the decoder layers that were loaded of each variant at the start; if plans are
compiled, it can use only those plans. No pass runs between two steps of the engine, so the new routes apply
from one pass to the next. The KV cache stays, as all variants read it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import torch
from vllm.logger import init_logger

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.module_names import describe_ranges
from flexquant.documents.results import digest_of
from flexquant.errors import FlexQuantError
from flexquant.policy.routes import RouteTable, route_changes
from flexquant.serving.config import clip_to_server
from flexquant.serving.options import ServedPolicy
from flexquant.serving.vllm_api import get_pp_group, get_tp_group, get_world_group
from flexquant.serving.worker.plan_views import decoder_path, is_compiled

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

    from flexquant.checkpoint.merged_config import MergedConfig
    from flexquant.policy.plans import Plan
    from flexquant.serving.worker.forward_pass import PassObserver
    from flexquant.serving.worker.graphs import PlanGraphs, Runner
    from flexquant.serving.worker.pass_records import PassRecords

logger = init_logger("vllm.flexquant.live_policy")

Result = TypeVar("Result")


def check_ranks_agree(routes: RouteTable, quantization_config: JsonObject) -> None:
    """Raise :class:`FlexQuantError`, on all ranks, if one has other routes or another merged checkpoint.

    ``quantization_config`` is that section of the merged checkpoint's config.json. Every rank has to call
    this.
    """
    world = get_world_group()
    if world.world_size == 1:
        return
    table = routes.to_json()
    mine = {
        "routes": digest_of([table["intervals"], table["plans"]]),
        "quantization_config in config.json": digest_of(quantization_config),
    }
    everyones: list[dict[str, str]] = [{}] * world.world_size
    torch.distributed.all_gather_object(everyones, mine, group=world.cpu_group)
    for what in mine:
        others = [rank for rank, digests in enumerate(everyones) if digests[what] != everyones[0][what]]
        if others:
            raise FlexQuantError(
                f"rank {others[0]} has other {what} than rank 0; give every machine the same policy file, "
                "merged checkpoint and options of vLLM"
            )


def on_all_ranks(step: Callable[[], Result]) -> Result:
    """Return the result of a step that succeeds on every rank of an engine; every rank has to call this.

    Raises :class:`FlexQuantError`, on all ranks, if the step raises anything on one of them.
    """
    result: Result | None = None
    failure: Exception | None = None
    try:
        result = step()
    except Exception as e:
        failure = e
        if not isinstance(e, FlexQuantError):
            logger.exception("a step that all ranks have to take together has failed")
    everyones = [reason_of(failure)]
    # Do not use the world group: it also has replicas of a mixture of experts, which run at other times.
    for group in (get_tp_group(), get_pp_group()):
        theirs: list[list[str]] = [[]] * group.world_size
        torch.distributed.all_gather_object(theirs, everyones, group=group.cpu_group)
        everyones = [*itertools.chain.from_iterable(theirs)]
    if reasons := [reason for reason in everyones if reason]:
        raise FlexQuantError(reasons[0]) from failure
    return cast(Result, result)


def reason_of(failure: Exception | None) -> str:
    """Return in one sentence why something failed; empty for None."""
    if failure is None or isinstance(failure, FlexQuantError):
        return str(failure or "")
    return f"{type(failure).__name__} ({failure}), and the worker's log tells where"


class RoutedModel(Protocol):
    """What a change of policy needs of the serving model."""

    merged: MergedConfig
    policy: ServedPolicy
    plans: dict[str, nn.Module]
    graphs: PlanGraphs
    observer: PassObserver
    records: PassRecords

    def build_plan(self, plan: Plan) -> nn.Module: ...


class LivePolicy:
    """One rank's part in the changes of its engine's policy."""

    def __init__(self, model: RoutedModel, vllm_config: VllmConfig) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self._loaded = model.policy.routes
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

        before = self._model.policy

        def check() -> tuple[ServedPolicy, JsonObject]:
            if seen is not None and before.digest not in seen:
                raise FlexQuantError(
                    f"the server took {before.name} while {policy.name} was being checked; look at GET "
                    f"/flexquant, and apply {policy.name} again"
                )
            after = clip_to_server(self._vllm_config, self._model.merged, policy)
            if not after.routes.ignores_phase():
                self._model.observer.check_phases()
            if problem := next(self._problems(after), None):
                raise FlexQuantError(f"{after.name} {problem}")
            return after, {
                "before": before.described(),
                "after": after.described(),
                "captures_graphs": not self._model.graphs.fit(after.routes),
                "routes": [change._asdict() for change in route_changes(before.routes, after.routes)],
            }

        after, told = on_all_ranks(check)
        if runner is not None:
            self._take(after, runner)
        return told

    def _problems(self, after: ServedPolicy) -> Iterator[str]:
        """Yield why this rank cannot take a policy."""
        needed, loaded = after.routes.layers, self._loaded.layers
        if missing := sorted(needed.keys() - loaded.keys()):
            yield (
                f"uses {' and '.join(missing)}, but the server has loaded {', '.join(loaded)}; take a policy "
                "that uses these alone, or start a server with one that uses all of them"
            )
        for name, numbers in needed.items():
            if absent := numbers - loaded[name]:
                yield (
                    f"uses layers {describe_ranges(absent)} of {name}, but the server has loaded its layers "
                    f"{describe_ranges(loaded[name])} alone; take a policy that uses no others of it, or "
                    "start a server with one that uses them all"
                )
        for name in sorted(needed):
            if after.routes.derived.get(name) != self._loaded.derived.get(name):
                yield (
                    f"derives {name} otherwise than the policy that the server was started with; derive it "
                    "in the same way, or start a server with this policy"
                )
        plans = self._model.plans
        unknown = [plan.name for plan in after.routes.plans if plan.name not in plans]
        if unknown and any(is_compiled(plan.get_submodule(decoder_path(plan))) for plan in plans.values()):
            yield (
                f"has the plan {unknown[0]}, but the server has compiled {', '.join(plans)}, and compiles no "
                "more; use these alone, or start a server with this policy"
            )
        if self._model.graphs.fit(after.routes):
            return
        for asked, what in (
            (self._vllm_config.speculative_config, "speculative decoding"),
            (self._vllm_config.kv_transfer_config, "a KV connector"),
        ):
            if asked is not None:
                yield (
                    f"needs other CUDA graphs, and with {what} they are captured at the start only; start a "
                    "server with this policy"
                )

    def _take(self, after: ServedPolicy, runner: Runner) -> None:
        """Route by a policy; ranks agree after every step that can fail, and no later step can."""
        model, before = self._model, self._model.policy

        def build_missing() -> dict[str, nn.Module]:
            model.observer.settle()
            missing = [plan for plan in after.routes.plans if plan.name not in model.plans]
            return {plan.name: model.build_plan(plan) for plan in missing}

        model.plans |= on_all_ranks(build_missing)
        model.policy = after
        if not model.graphs.fit(after.routes):
            self._capture_again(runner, before)
        logger.info("FlexQuant: policy %s instead of %s", after.name, before.name)
        try:
            model.records.announce_policy(after)
        except Exception:
            logger.exception("policy %s is served, but this rank could not note that", after.name)

    def _capture_again(self, runner: Runner, before: ServedPolicy) -> None:
        """Capture CUDA graphs for the policy; if a rank fails, all return to the policy ``before``."""
        model, graphs = self._model, self._model.graphs

        def capture() -> None:
            graphs.capture_again(runner, self._vllm_config)

        pieces = graphs.pieces()
        with model.observer.capturing():
            try:
                on_all_ranks(capture)
                return
            except FlexQuantError as e:
                failure = e
            name, model.policy = model.policy.name, before
            graphs.drop_pieces(but=pieces)
            try:
                on_all_ranks(capture)
                served = "is served as before"
            except FlexQuantError as e:
                graphs.do_without(runner)
                served = (
                    f"is served without CUDA graphs, since its own could not be captured again ({e}); start "
                    "the server anew to have them back"
                )
        raise FlexQuantError(
            f"the CUDA graphs of {name} could not be captured on every rank ({failure}); {before.name} "
            f"{served}"
        ) from failure
