# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a measurement's device is called, also in documents that a user has edited."""

from __future__ import annotations

from typing import Any

import pytest

from flexquant.measuring.machine import describe_machine
from flexquant.policy.pass_times import device_name


@pytest.mark.parametrize(
    ("origin", "name"),
    [
        ({"machine": {"cpu": "C", "cores": 2, "gpu": "NVIDIA L4"}}, "NVIDIA L4"),
        ({"machine": {"cpu": "C", "cores": 2, "gpu": None}}, "C, 2 cores"),
        ({"device": "h100"}, "h100"),
        ({"machine": "my laptop"}, "my laptop"),
        ({}, "an unknown machine"),
    ],
)
def test_devices_are_named(origin: dict[str, Any], name: str) -> None:
    assert device_name(origin) == name


def test_this_machine_has_a_name() -> None:
    machine = describe_machine()
    assert device_name({"machine": machine}).startswith(machine["gpu"] or machine["cpu"])
