# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Predict for a merged checkpoint on a device: pass times, the fastest variant by size, requests that fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from flexquant.errors import FlexQuantError
from flexquant.planning.device import Device
from flexquant.planning.model_shape import ModelShape
from flexquant.planning.roofline import CostParts, attention_cost, pass_cost, scheme_on
from flexquant.policy.pass_times import Curve, PassTimes, Time

Errors = Mapping[str, Mapping[str, Mapping[int, float]]]
"""Phase -> variant -> size -> predicted / measured - 1."""

PHASES = ("decode", "prefill")
DECODE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PREFILL_SIZES = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
MAX_SIZE = 4096
"""Largest pass, in sequences or tokens, for which the fastest variant is determined."""
UTILIZATION = 0.9
"""Share of the memory that vLLM takes by default."""
CONTEXT = 1152
"""Default tokens of a sequence in the KV cache: half way through an answer of 256 to a prompt of 1024."""


@dataclass(frozen=True)
class Winner:
    """The variant that is fastest for passes of ``first`` to ``last`` sequences or tokens."""

    variant: str
    first: int
    last: int


@dataclass(frozen=True)
class HardwareRow:
    """One variant's row of the hardware table, for a decode pass of as many requests as fit."""

    rate_tflops: float
    """Rate that the kernel reaches."""
    requests_alone: int
    """Requests that fit if no other variant is loaded."""
    tokens_per_s: float
    compute_seconds: float
    memory_seconds: float


def roofline_pass_times(model: ModelShape, device: Device, context: int) -> PassTimes:
    """Return predicted times of passes; decode has ``context`` tokens a sequence in the KV cache.

    A prediction has no interval: low, median and high are equal.
    """

    def curves(phase: str, sizes: tuple[int, ...]) -> dict[str, Curve]:
        return {
            variant: {
                size: Time(*3 * [pass_cost(model, variant, phase, size, context, device).seconds])
                for size in sizes
            }
            for variant in model.variants
        }

    return PassTimes(
        curves("decode", DECODE_SIZES),
        curves("prefill", PREFILL_SIZES),
        context,
        attention_cost(model, 1, device).seconds,
        {"device": device.name, "description": device.description},
    )


def fastest_by_size(
    model: ModelShape, phase: str, context: int, device: Device, max_size: int = MAX_SIZE
) -> list[Winner]:
    """Return the fastest variants for sizes 1 to ``max_size``, in order; each starts at a crossover."""
    winners: list[Winner] = []
    for size in range(1, max_size + 1):
        times = {v: pass_cost(model, v, phase, size, context, device).seconds for v in model.variants}
        best = min(times, key=lambda variant: times[variant])
        if winners and winners[-1].variant == best:
            winners[-1] = Winner(best, winners[-1].first, size)
        else:
            winners.append(Winner(best, size, size))
    return winners


def max_requests(
    model: ModelShape,
    device: Device,
    tokens: int,
    utilization: float,
    variants: Collection[str] | None = None,
) -> int:
    """Return how many requests of ``tokens`` tokens the KV cache holds at once, at least 1.

    Arguments and errors are those of :func:`kv_cache_tokens`.
    """
    return kv_cache_tokens(model, device, tokens, utilization, variants) // tokens


def kv_cache_tokens(
    model: ModelShape,
    device: Device,
    tokens: int,
    utilization: float,
    variants: Collection[str] | None = None,
) -> int:
    """Return how many tokens the KV cache holds.

    ``utilization`` is the share of the memory that vLLM may take, ``variants`` are the loaded variants (None:
    all). Raises :class:`FlexQuantError`, with the numbers, unless the model and one request of ``tokens``
    tokens fit.
    """
    variants = model.variants if variants is None else variants
    weights = model.bytes_of(variants)
    budget = device.memory_bytes * utilization
    left = budget - weights - device.reserve_bytes
    request = tokens * model.kv_bytes_per_token
    if left < request:
        raise FlexQuantError(
            f"the model does not fit on {device.name}: {_gib(weights)} GiB of weights "
            f"({', '.join(variants)}), {_gib(device.reserve_bytes)} GiB for activations and the "
            f"runtime and {_gib(request)} GiB of KV cache for one request of {tokens} tokens, but "
            f"{utilization:g} of its {_gib(device.memory_bytes)} GiB is {_gib(budget)} GiB; give a larger "
            "--tensor-parallel-size, shorter requests, a larger device or a checkpoint with fewer variants"
        )
    return int(left // model.kv_bytes_per_token)


def hardware_table(
    model: ModelShape, device: Device, context: int, tokens: int, utilization: float
) -> dict[str, HardwareRow]:
    """Return one row per variant, for requests of ``tokens`` tokens; raises as :func:`max_requests` does."""
    requests = max_requests(model, device, tokens, utilization)
    rows = {}
    for variant in model.variants:
        cost: CostParts = pass_cost(model, variant, "decode", requests, context, device)
        scheme = main_scheme(model, variant, device)
        rows[variant] = HardwareRow(
            device.kernel(scheme).flops_per_s / 1e12,
            max_requests(model, device, tokens, utilization, [variant]),
            requests / cost.seconds,
            cost.compute,
            cost.memory,
        )
    return rows


def main_scheme(model: ModelShape, variant: str, device: Device) -> str:
    """Return the scheme of most of a variant's weights on a device."""
    sizes: Counter[str] = Counter()
    for linear, count in model.linears[variant].items():
        scheme = scheme_on(device, linear, linear.scheme)
        sizes[scheme] += count * linear.experts * linear.inputs * linear.outputs
    return sizes.most_common(1)[0][0]


def errors(model: ModelShape, device: Device, measured: PassTimes) -> Errors:
    """Return predicted / measured - 1 for every measured size.

    Raises :class:`FlexQuantError` if the measurement and the model have no variant in common.
    """
    variants = [variant for variant in measured.variants if variant in model.variants]
    if not variants:
        raise FlexQuantError(
            f"the measurement is of {', '.join(measured.variants)}, but the model has "
            f"{', '.join(model.variants)}; give a policy that was tuned for this checkpoint"
        )
    return {
        phase: {
            variant: {
                size: pass_cost(model, variant, phase, size, measured.context, device).seconds / time.median
                - 1
                for size, time in curves[variant].items()
            }
            for variant in variants
        }
        for phase, curves in (("decode", measured.decode), ("prefill", measured.prefill))
    }


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g}"
