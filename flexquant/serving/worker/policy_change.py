# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Decide whether a serving model can take another policy, and what that changes.

The policy can use the decoder layers that were loaded of each variant at the start; if plans are compiled, it
can use only those plans. No pass runs between two steps of the engine, so the new routes apply from one pass
to the next. The KV cache stays, as all variants read it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexquant.checkpoint.merged_config import MergedConfig
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.module_names import describe_ranges
from flexquant.documents.results import digest_of
from flexquant.errors import FlexQuantError
from flexquant.policy.route_changes import route_changes
from flexquant.serving.config import build_routes, check_supported

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from flexquant.policy.routes import RouteTable
    from flexquant.policy.rules import Derivation, Policy
    from flexquant.serving.worker.graphs import PlanGraphs


@dataclass(frozen=True)
class ServedPolicy:
    """The policy by which a model routes."""

    name: str
    """Name for users: a built-in policy's name, a file's path, or the name that they gave."""
    digest: str
    """SHA-256 of the policy document, in hexadecimal."""
    routes: RouteTable

    def described(self) -> dict[str, str]:
        """Return the name and the digest, for people."""
        return {"name": self.name, "digest": self.digest}


def served_policy(vllm_config: VllmConfig, merged: MergedConfig, name: str, policy: Policy) -> ServedPolicy:
    """Build the routes of a policy; raise :class:`FlexQuantError` if ``merged`` cannot be served by it."""
    routes = build_routes(vllm_config, merged, policy)
    check_supported(vllm_config, merged, routes)
    return ServedPolicy(name, digest_of(policy.document), routes)


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
        "routes": [change.to_data() for change in route_changes(before.routes, after.routes)],
    }
