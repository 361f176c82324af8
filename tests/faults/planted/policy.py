# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a policy document means."""

from __future__ import annotations

from tests.faults.fault import Fault

POLICY = (
    Fault(
        "batch-size-max-exclusive",
        "A rule's 'max' leaves out the batch of exactly that size.",
        "flexquant/policy/ranges.py",
        "self.max * unit + 1",
        "self.max * unit",
        ("tests/unit/test_routes.py::test_lookup_at_the_edges",),
    ),
    Fault(
        "single-size-never-matches",
        "A rule for one size alone, with 'max' equal to 'min', takes no pass.",
        "flexquant/policy/ranges.py",
        "self.max is None or number <= self.max",
        "self.max is None or number < self.max",
        ("tests/unit/test_routes.py::test_a_rule_for_one_size_alone",),
    ),
    Fault(
        "last-layer-left-out",
        "A range of layers in a policy ends one layer early.",
        "flexquant/policy/routes.py",
        "return range(first, last + 1)",
        "return range(first, max(last, first + 1))",
        ("tests/unit/test_routes.py::test_layers_of_the_layered_builtin",),
    ),
)
