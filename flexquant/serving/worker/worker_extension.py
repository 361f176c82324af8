# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Add methods to vLLM's workers, called by name (``collective_rpc``): their status, and a change of policy.

A later policy can use the decoder layers that were loaded of each variant at the start; if plans are
compiled, it can use only those plans. No pass runs between two steps of the engine, so the new routes apply
from one pass to the next. The KV cache stays, as all variants read it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol

from torch import nn
from vllm.logger import init_logger

from flexquant import __version__
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.module_names import describe_ranges
from flexquant.errors import FlexQuantError
from flexquant.policy.routes import route_changes
from flexquant.policy.schema import PHASES
from flexquant.serving.config import RankMetrics, ServedPolicy, ServedPolicyData, check_caches, clip_to_server
from flexquant.serving.kernels.layers import kernel_names
from flexquant.serving.worker.plan_views import decoder_path, is_compiled
from flexquant.serving.worker.ranks import on_all_ranks

if TYPE_CHECKING:
    from flexquant.serving.worker.graphs import Runner
    from flexquant.serving.worker.model import FlexQuantForCausalLM

logger = init_logger("vllm.flexquant.policy")


class ServingWorker(Protocol):
    """What the methods need of vLLM's worker, whatever its device and runner."""

    model_runner: Runner

    def get_model(self) -> FlexQuantForCausalLM: ...


class FlexQuantWorker:
    """Methods for vLLM's worker; vLLM adds this class to its bases (``--worker-extension-cls``)."""

    def flexquant_status(self: ServingWorker) -> JsonObject:
        """Return what this rank serves and has counted (:func:`status_of`), for ``GET /flexquant``."""
        return status_of(self.get_model())

    def flexquant_metrics(self: ServingWorker) -> RankMetrics | None:
        """Return this rank's counters and weights for ``/metrics``; None if another rank counts."""
        return self.get_model().records.metrics_data(self.get_model().weight_bytes_by_layers)

    def flexquant_change_policy(
        self: ServingWorker, policy: ServedPolicyData, dry_run: bool, seen: list[str] | None = None
    ) -> JsonObject:
        """Change the policy, as :func:`change_policy` does; ``dry_run`` only returns what would change."""
        try:
            runner = None if dry_run else self.model_runner
            return change_policy(self.get_model(), ServedPolicy.from_json(policy), runner, seen)
        except FlexQuantError as e:
            return {"refused": str(e)}


def status_of(model: FlexQuantForCausalLM) -> JsonObject:
    """Return bytes and kernels by variant, routes by phase, and counters: the server's ``Status``."""
    return {
        "flexquant": __version__,
        "architecture": model.merged.base_architecture,
        "policy": model.policy.described(),
        "plans": model.routes.layers_by_plan(),
        "routes": {phase: [row.to_data() for row in model.routes.intervals(phase)] for phase in PHASES},
        "kernels": {name: kernel_names(variant) for name, variant in model.variants.items()},
        "weight_bytes": model.weight_bytes,
        "weight_bytes_by_layers": model.weight_bytes_by_layers,
        "last_pass": model.records.last_pass(),
        "counted": model.records.counted(),
    }


def change_policy(
    model: FlexQuantForCausalLM, policy: ServedPolicy, runner: Runner | None, seen: Collection[str] | None
) -> JsonObject:
    """Route by another policy from the next pass on; return what that changes.

    The front end has resolved ``policy`` for this server. ``seen`` holds digests of the policies that it may
    replace; None: any. No pass may be running. ``runner``, vLLM's model runner, captures missing CUDA graphs;
    None only returns what would change. Raises :class:`FlexQuantError`, and changes nothing, if the model
    cannot take the policy on some rank.
    """
    before = model.policy

    def check() -> tuple[ServedPolicy, JsonObject]:
        if seen is not None and before.digest not in seen:
            meanwhile = f"the server took {before.name} while {policy.name} was being checked"
            raise FlexQuantError(f"{meanwhile}; look at GET /flexquant, and apply {policy.name} again")
        after = clip_to_server(model.vllm_config, model.merged, policy)
        check_caches(model.vllm_config, model.merged, after.name, before.routes, after.routes)
        if not after.routes.ignores_phase():
            model.observer.check_phases()
        if problem := next(problems(model, after), None):
            raise FlexQuantError(f"{after.name} {problem}")
        return after, {
            "before": before.described(),
            "after": after.described(),
            "captures_graphs": not model.graphs.fit(after.routes),
            "routes": [asdict(change) for change in route_changes(before.routes, after.routes)],
        }

    after, told = on_all_ranks(check)
    if runner is not None:
        take(model, after, runner)
    return told


def problems(model: FlexQuantForCausalLM, after: ServedPolicy) -> Iterator[str]:
    """Yield why this rank cannot take a policy."""
    needed, loaded = after.routes.layers, model.first_routes.layers
    if missing := sorted(needed.keys() - loaded.keys()):
        problem = f"uses {' and '.join(missing)}, but the server has loaded {', '.join(loaded)}"
        advice = "take a policy that uses these alone, or start a server with one that uses all of them"
        yield f"{problem}; {advice}"
    for name, numbers in sorted(needed.items()):
        if absent := numbers - loaded[name]:
            there = f"the server has loaded its layers {describe_ranges(loaded[name])} alone"
            advice = "take a policy that uses no others of it, or start a server with one that uses them all"
            yield f"uses layers {describe_ranges(absent)} of {name}, but {there}; {advice}"
        if after.routes.derived.get(name) != model.first_routes.derived.get(name):
            problem = f"derives {name} otherwise than the policy that the server was started with"
            yield f"{problem}; derive it in the same way, or start a server with this policy"
    if after.routes.head != model.first_routes.head:
        started = f"the server was started with 'head: {model.first_routes.head}'"
        yield f"has 'head: {after.routes.head}', but {started}; start a server with this policy"
    plans = model.plans
    unknown = [plan.name for plan in after.routes.plans if plan.name not in plans]
    if unknown and any(is_compiled(plan.get_submodule(decoder_path(plan))) for plan in plans.values()):
        problem = f"has the plan {unknown[0]}, but the server has compiled {', '.join(plans)}"
        yield f"{problem}, and compiles no more; use these alone, or start a server with this policy"
    if model.graphs.fit(after.routes):
        return
    for asked, what in (
        (model.vllm_config.speculative_config, "speculative decoding"),
        (model.vllm_config.kv_transfer_config, "a KV connector"),
    ):
        if asked is not None:
            problem = f"needs other CUDA graphs, and with {what} they are captured at the start only"
            yield f"{problem}; start a server with this policy"


def take(model: FlexQuantForCausalLM, after: ServedPolicy, runner: Runner) -> None:
    """Route by a policy; ranks agree after every step that can fail, and no later step can."""
    before = model.policy

    def build_missing() -> dict[str, nn.Module]:
        model.observer.settle()
        missing = [plan for plan in after.routes.plans if plan.name not in model.plans]
        return {plan.name: model.build_plan(plan) for plan in missing}

    model.plans |= on_all_ranks(build_missing)
    model.policy = after
    if not model.graphs.fit(after.routes):
        capture_again(model, runner, before)
    logger.info("FlexQuant: policy %s instead of %s", after.name, before.name)
    try:
        model.records.announce_policy(after)
    except Exception:
        logger.exception("policy %s is served, but this rank could not note that", after.name)


def capture_again(model: FlexQuantForCausalLM, runner: Runner, before: ServedPolicy) -> None:
    """Capture CUDA graphs for the policy; if a rank fails, all return to the policy ``before``."""
    capture = functools.partial(model.graphs.capture_again, runner, model.vllm_config)
    drop_pieces = model.graphs.note_pieces()
    with model.observer.capturing():
        try:
            on_all_ranks(capture)
            return
        except FlexQuantError as e:
            failure = e
        name, model.policy = model.policy.name, before
        drop_pieces()
        try:
            on_all_ranks(capture)
            served = "is served as before"
        except FlexQuantError as e:
            model.graphs.do_without(runner)
            served = f"is served without CUDA graphs, since its own could not be captured again ({e})"
            served += "; start the server anew to have them back"
    problem = f"the CUDA graphs of {name} could not be captured on every rank ({failure})"
    raise FlexQuantError(f"{problem}; {before.name} {served}") from failure
