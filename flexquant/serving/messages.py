# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What the front end and the workers tell each other, as vLLM carries it: plain data."""

from __future__ import annotations

from typing import TypedDict

from flexquant.checkpoint.model_config import JsonObject
from flexquant.policy.routes import RouteTableData


class PolicyName(TypedDict):
    name: str
    digest: str
    """SHA-256 of the policy document without its measured times, in hexadecimal."""


class ServedPolicyData(PolicyName):
    """A :class:`flexquant.serving.config.ServedPolicy` as plain data."""

    routes: RouteTableData


class RankMetrics(TypedDict):
    """What the rank that counts tells for ``/metrics``."""

    engine: str
    policies: list[tuple[str, str, int]]
    """Name and digest of each policy that has routed, and 1 for the one that routes now, else 0."""
    counted: list[JsonObject]
    """Plan, phase, and the counters of :meth:`flexquant.serving.worker.pass_records.PlanCounters.to_data`."""
    sizes: list[tuple[list[tuple[str, int]], int]]
    """For each record of ``counted``: the upper end of each bucket with the number of passes up to it, and
    the sum of the passes' sizes."""
    weight_bytes_by_layers: dict[str, dict[str, int]]
