# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Find the times that a simulation uses, and check that they cover a policy."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from flexquant.checkpoint.merged_config import VARIANT_NAME, MergedConfig
from flexquant.checkpoint.model_config import JsonObject
from flexquant.errors import FlexQuantError
from flexquant.planning.server import Limits
from flexquant.policy.default_policy import find_measured
from flexquant.policy.pass_times import PassTimes
from flexquant.policy.routes import RouteTable, build_route_table
from flexquant.policy.rules import Policy, builtin_policies, load_policy

ADVICE = "measure them with 'flexquant tune', or name a tuned policy with --times"


def find_times(
    policies: Sequence[str], given: str | None = None, stored: JsonObject | None = None
) -> tuple[PassTimes, str]:
    """Return measured times, and the policy that carries them.

    The policy is ``given`` if it is not None, else the first of ``policies`` with times, else a checkpoint's
    ``stored`` policy. Raises FlexQuantError if none has times.
    """
    if given is None:
        for name in policies:
            if not _may_be_variant(name) and (times := load_policy(name).measured):
                return times, name
    if found := find_measured(given, stored):
        return found
    raise FlexQuantError(f"none of the policies {', '.join(policies)} has measured times; {ADVICE}")


def check_times(name: str, policy: Policy, times: PassTimes) -> None:
    """Raise FlexQuantError unless there are times for every variant of a policy."""
    for variant in policy.variants:
        if variant not in times.variants:
            raise FlexQuantError(
                f"policy {name} uses '{variant}', but there are times for {', '.join(times.variants)} only; "
                f"{ADVICE} that has '{variant}' too"
            )


def route_table(
    policy: Policy, times: PassTimes, limits: Limits, model: tuple[MergedConfig, int] | None = None
) -> RouteTable:
    """Return the table that serving builds for a policy; ``model`` is a merged config and number of layers.

    Without a model, the checkpoint is assumed to hold every variant that has times, and a policy that names
    layers raises FlexQuantError.
    """
    variants: Collection[str]
    mixable: Collection[Collection[str]] | None
    if model is None:
        for rule in policy.rules:
            for layers in rule.layers:
                raise FlexQuantError(
                    f"{layers.place} names layers, but how many the model has is not known; give the merged "
                    "checkpoint with --model"
                )
        sources = {derivation.source for derivation in policy.derived.values()}
        variants, num_layers, mixable = (set(times.variants) | sources) - set(policy.derived), 1, None
    else:
        variants, num_layers, mixable = model[0].variants, model[1], model[0].mixable_groups
    return build_route_table(
        policy,
        variants,
        num_layers,
        max_tokens=limits.max_num_batched_tokens,
        mixable=mixable,
        max_decode_tokens=limits.max_decode_tokens,
    )


def _may_be_variant(name: str) -> bool:
    is_file = name in builtin_policies() or Path(name).is_file()
    return VARIANT_NAME.fullmatch(name) is not None and not is_file
