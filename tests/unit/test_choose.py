# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Which policy is used: the one given, else the checkpoint's, else the default; and where times come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexquant.errors import FlexQuantError
from flexquant.policy.default_policy import (
    DEFAULT_POLICY,
    choose_policy,
    default_name,
    find_measured,
    find_policies,
)
from flexquant.policy.rules import load_policy

TUNED = str(Path(__file__).parents[2] / "benchmarks/results/tuning/smollm2-135m.yaml")
STORED = load_policy("w4a16").document


def test_the_given_policy_comes_before_the_checkpoints_and_that_before_the_default() -> None:
    assert choose_policy("w8a8", STORED)[0] == "w8a8"
    assert choose_policy("w8a8", STORED)[1].variants == ("w8a8",)
    name, policy = choose_policy(None, STORED)
    assert (name, policy.variants) == ("the checkpoint's policy", ("w4a16",))
    name, policy = choose_policy()
    assert name == DEFAULT_POLICY and policy.document == load_policy(DEFAULT_POLICY).document


def test_a_stored_policy_that_breaks_the_schema_is_named() -> None:
    with pytest.raises(FlexQuantError, match="the checkpoint's policy: .*rules"):
        choose_policy(None, {"schema": STORED["schema"], "rules": []})


@pytest.mark.parametrize("stored", [None, STORED])
def test_the_default_is_found_among_the_policies_that_are_compared(stored: dict | None) -> None:
    name = default_name(stored)
    (policy,) = find_policies([name], ["w8a8", "w4a16"], "merged", stored).values()
    assert policy.document == choose_policy(None, stored)[1].document


def test_measured_times_are_those_of_the_chosen_policy() -> None:
    tuned = load_policy(TUNED)
    assert find_measured(TUNED) == (tuned.measured, TUNED)
    assert find_measured(None, tuned.document) == (tuned.measured, "the checkpoint's policy")
    assert find_measured(None, STORED) is None and find_measured(None) is None
    with pytest.raises(FlexQuantError, match="w8a8 has no measured times .*flexquant tune"):
        find_measured("w8a8", tuned.document)
