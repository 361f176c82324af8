# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A plan's digest, part of the key of its compiled code, covers all that the code depends on."""

from __future__ import annotations

import copy
from typing import Any

from flexquant.checkpoint.merged_config import MergedConfig, StoredVariant
from flexquant.policy.plans import Plan
from flexquant.policy.schema import Derivation
from flexquant.serving.worker.plan_views import plan_digest


def section(bits: int) -> dict[str, Any]:
    group = {"weights": {"num_bits": bits, "type": "int"}, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


MERGED = MergedConfig(
    "LlamaForCausalLM",
    {
        name: StoredVariant(f"{name}.", section(bits), True, False)
        for name, bits in (("w8a8", 8), ("w4a16", 4))
    },
)
LAYERED = Plan.from_layers(("w8a8", "w4a16", "w4a16"))
W4A8 = Plan.from_layers(("w4a8", "w4a8", "w4a8"))


def derived(**how: str) -> dict[str, Derivation]:
    return {"w4a8": Derivation.model_validate({"from": "w4a16", **how})}


INT8 = derived(activations="int8")


def with_group_size(variant: str) -> MergedConfig:
    merged = copy.deepcopy(MERGED)
    weights = merged.variants[variant].quantization_config["config_groups"]["group_0"]["weights"]
    weights["group_size"] = 32
    return merged


def test_it_changes_with_the_layers_and_the_scheme_of_every_variant_in_the_plan() -> None:
    other = Plan.from_layers(("w4a16", "w8a8", "w4a16"))
    digests = {plan_digest(plan, MERGED, {}) for plan in (LAYERED, other)}
    digests |= {plan_digest(LAYERED, with_group_size(variant), {}) for variant in ("w8a8", "w4a16")}
    assert len(digests) == 4


def test_it_changes_with_the_derivation_and_what_that_starts_from() -> None:
    fp8, one_copy = derived(activations="fp8"), derived(activations="int8", weights="int8")
    digests = {
        plan_digest(W4A8, MERGED, INT8),
        plan_digest(W4A8, MERGED, fp8),
        plan_digest(W4A8, MERGED, one_copy),
        plan_digest(W4A8, with_group_size("w4a16"), INT8),
    }
    assert len(digests) == 4


def test_it_stays_the_same_whatever_else_the_policy_and_the_checkpoint_hold() -> None:
    """So a new threshold in the policy compiles nothing anew."""
    assert plan_digest(W4A8, MERGED, INT8) == plan_digest(W4A8, with_group_size("w8a8"), INT8)
