# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Choose how to serve a model on a device: a replay of each load in each way, on predicted times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean

from flexquant.errors import FlexQuantError
from flexquant.planning.device import GIB, Device
from flexquant.planning.linears import INT4
from flexquant.planning.model_shape import ModelShape
from flexquant.planning.pass_cost import PassCost
from flexquant.planning.planned_model import PlannedModel
from flexquant.planning.predicting import kv_cache_tokens, roofline_pass_times
from flexquant.planning.replaying import replay
from flexquant.planning.roofline import scheme_on
from flexquant.planning.server import Limits, Machine, server_limits
from flexquant.planning.simulation_report import summarise_replay
from flexquant.planning.times import route_table
from flexquant.planning.trace import Request
from flexquant.policy.default_policy import find_policies
from flexquant.policy.rules import Policy, load_policy

MARGIN = 0.08
"""Share of a request's time that a prediction cannot tell from none.

What two copies save was predicted within so much of what they saved in the committed runs.
"""
ONE_COPY, TWO_COPIES = "one copy", "two copies"


@dataclass(frozen=True)
class Way:
    """A way to serve a model."""

    name: str
    schemes: tuple[str, ...]
    """The schemes that the checkpoint holds."""
    policy: Policy
    is_flexquant: bool
    """Whether it takes FlexQuant; stock vLLM serves the others."""


@dataclass(frozen=True)
class Load:
    """Means over the requests of a load that all arrive at once, in seconds."""

    ttft: float
    tpot: float
    request: float
    """From arrival to the last token."""


@dataclass(frozen=True)
class Outcome:
    """What one way comes to."""

    way: Way
    weights_gib: float
    """On each device."""
    kv_cache_tokens: int | None
    """None if the way is not possible."""
    loads: Mapping[int, Load]
    """Requests at once -> what they see; empty if the way is not possible."""
    problem: str
    """Why the way is not possible; empty if it is."""

    @property
    def seconds(self) -> float:
        """Time of a request, the geometric mean over the loads."""
        return geometric_mean(load.request for load in self.loads.values())


@dataclass(frozen=True)
class Batches:
    """Loads to replay, each of which arrives at once; all requests are alike."""

    input_tokens: int
    output_tokens: int
    concurrency: Sequence[int]
    """Requests at once, one number for each load."""


def ways(device: Device) -> list[Way]:
    """Return the ways to serve a model, the simplest first.

    Two copies have W8A8 beside W4A16, or FP8 on a device without an INT8 kernel.
    """
    eight, policy = ("w8a8", "phase-batch") if "w8a8" in device.kernels else ("fp8", "fp8-phase-batch")
    static = {"FP8": "fp8", "W8A8": "w8a8", "W4A16": "w4a16"}
    return [
        *(
            Way(f"stock {name}", (scheme,), find_policies([scheme], [scheme])[scheme], False)
            for name, scheme in static.items()
        ),
        Way(ONE_COPY, ("w4a16",), load_policy("one-copy"), True),
        Way(TWO_COPIES, (eight, "w4a16"), load_policy(policy), True),
    ]


def try_ways(
    model: PlannedModel, device: Device, batches: Batches, tensor_parallel_size: int, utilization: float
) -> list[Outcome]:
    """Return what each of :func:`ways` comes to; raise FlexQuantError for a model that cannot be predicted.

    ``utilization`` is the share of the memory that vLLM may take.
    """
    limits = server_limits(Machine.of_device(device, tensor_parallel_size))
    tokens_of_request = batches.input_tokens + batches.output_tokens
    longest = limits.blocks_of(tokens_of_request) * limits.block_size
    outcomes = []
    for way in ways(device):
        shape = model.shape(way.schemes, tensor_parallel_size, way.policy.derived)
        tokens, loads = None, {}
        problem = _problem(way, shape, device, model.group_size)
        if not problem:
            try:
                tokens = kv_cache_tokens(shape, device, longest, utilization)
            except FlexQuantError:
                problem = f"does not fit into {utilization:g} of {device.memory_bytes / GIB:.3g} GiB"
        if tokens is not None:
            loads = _replay_loads(way, shape, device, batches, replace(limits, kv_cache_tokens=tokens))
        outcomes.append(Outcome(way, shape.resident_bytes / GIB, tokens, loads, problem))
    return outcomes


def _problem(way: Way, shape: ModelShape, device: Device, group_size: int) -> str:
    every = [linear for linears in shape.linears.values() for linear in linears]
    needed = {scheme_on(device, linear, linear.scheme) for linear in every}
    if "fp8" in needed and "fp8" not in device.kernels:
        return "the device has no FP8 arithmetic"
    if "w8a8" in needed and "w8a8" not in device.kernels:
        return "vLLM has no INT8 kernel for the device"
    for linear in every:
        if linear.scheme in INT4 and linear.inputs % group_size:
            return f"groups of {group_size} do not divide the {linear.inputs} inputs of a device"
        if linear.source_bytes and device.is_gpu and not linear.fills_marlin:
            return f"{linear.inputs} inputs and {linear.outputs} outputs do not fill Marlin's tiles"
    return ""


def _replay_loads(
    way: Way, shape: ModelShape, device: Device, batches: Batches, limits: Limits
) -> dict[int, Load]:
    times = roofline_pass_times(shape, device, batches.input_tokens + batches.output_tokens // 2)
    table, cost = route_table(way.policy, times, limits), PassCost(times)
    loads = {}
    for count in batches.concurrency:
        trace = [Request(0.0, batches.input_tokens, batches.output_tokens)] * count
        found = replay(trace, table, cost, limits)
        summary = summarise_replay(found)
        request = sum(sequence.last_token for sequence in found.sequences) / count
        loads[count] = Load(summary["mean_ttft_ms"] / 1e3, (summary["mean_tpot_ms"] or 0.0) / 1e3, request)
    return loads


def choose(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the simplest way that is as good as the fastest, within the margin; None if none is possible.

    With FlexQuant it is also better, by the margin, than every way without.
    """
    stock, ours = (fastest_way(outcomes, is_flexquant=which) for which in (False, True))
    least = min((found.seconds for found in (stock, ours) if found is not None), default=0.0)
    most = least / (1 - MARGIN)
    is_flexquant = stock is None or stock.seconds > most
    if is_flexquant and stock is not None:
        most = min(most, stock.seconds * (1 - MARGIN))
    good = [o for o in outcomes if o.loads and o.way.is_flexquant == is_flexquant and o.seconds <= most]
    return next(iter(good), None)


def fastest_way(outcomes: Sequence[Outcome], *, is_flexquant: bool) -> Outcome | None:
    """Return the fastest of the possible ways with FlexQuant, or of those without; None if there is none."""
    possible = [o for o in outcomes if o.loads and o.way.is_flexquant == is_flexquant]
    return min(possible, key=lambda outcome: outcome.seconds, default=None)


def find_way(outcomes: Sequence[Outcome], name: str) -> Outcome:
    """Return what the way of that name comes to."""
    return next(outcome for outcome in outcomes if outcome.way.name == name)
