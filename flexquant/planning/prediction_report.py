# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Format a prediction as tables for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from flexquant.checkpoint.model_config import JsonObject
from flexquant.documents.results import table_lines
from flexquant.planning.device import Device
from flexquant.planning.model_shape import ModelShape
from flexquant.planning.predicting import (
    MAX_SIZE,
    PHASES,
    Errors,
    HardwareRow,
    Winner,
    errors,
    fastest_by_size,
    hardware_table,
    max_requests,
    roofline_pass_times,
)
from flexquant.policy.pass_times import Curve, PassTimes, device_name

GIB = 2**30
EITHER = "either"


@dataclass(frozen=True)
class PredictionReport:
    device: str
    tensor_parallel_size: int
    """Number of devices; memory, weights and KV cache are those of one device."""
    memory_gib: float
    memory_gb_per_s: float
    tokens: tuple[int, int]
    """(Prompt, output) tokens of a request."""
    max_requests: int
    weights_gib: float
    kv_kib_per_token: float
    hardware: Mapping[str, HardwareRow]
    """Variant -> its row of the hardware table."""
    times: PassTimes
    fastest: Mapping[str, list[Winner]]
    """Phase -> fastest variants by size; decode ends at the number of requests that fit."""
    has_sliding_window: bool
    measured: str | None
    """Name and origin of the measurement that the prediction is compared with; None without one."""
    errors: Errors | None
    """Errors of the predicted times; None without a measurement."""

    def to_json(self) -> JsonObject:
        return {**asdict(self), "times": self.times.to_data()}


def report_prediction(
    model: ModelShape,
    device: Device,
    input_tokens: int,
    output_tokens: int,
    utilization: float,
    measured: tuple[PassTimes, str] | None = None,
) -> PredictionReport:
    """Predict for requests of these lengths; ``measured`` are times to compare with, and their policy's name.

    Raises FlexQuantError for a model that does not fit, and for times of other variants.
    """
    tokens = input_tokens + output_tokens
    context = input_tokens + output_tokens // 2
    requests = max_requests(model, device, tokens, utilization)
    most = {"decode": min(MAX_SIZE, requests), "prefill": MAX_SIZE}
    return PredictionReport(
        device.name,
        model.tensor_parallel_size,
        device.memory_bytes / GIB,
        device.bytes_per_s / 1e9,
        (input_tokens, output_tokens),
        requests,
        model.resident_bytes / GIB,
        model.kv_bytes_per_token / 1024,
        hardware_table(model, device, context, tokens, utilization),
        roofline_pass_times(model, device, context),
        {phase: fastest_by_size(model, phase, context, device, most[phase]) for phase in PHASES},
        model.has_sliding_window,
        None if measured is None else f"{measured[1]} ({describe_origin(measured[0].origin)})",
        None if measured is None else errors(model, device, measured[0]),
    )


def describe_origin(origin: JsonObject) -> str:
    """Return where times come from: the measured machine and its tensor-parallel size, or the device."""
    if "machine" not in origin and "device" in origin:
        return f"predicted for {origin['device']}"
    arguments = origin.get("engine_arguments")
    size = arguments.get("tensor_parallel_size", 1) if isinstance(arguments, Mapping) else "unknown"
    return f"measured on {device_name(origin)}, tensor-parallel size {size}"


def format_prediction(report: PredictionReport) -> str:
    """Return the report as text for a terminal."""
    prompt, output = report.tokens
    hardware = [
        ["", "rate", "max", "max", "compute", "memory", "requests"],
        ["", "TFLOPS", "requests", "tokens/s", "ms", "ms", "alone"],
    ]
    for variant, row in report.hardware.items():
        rate, tokens_per_s = f"{row.rate_tflops:.4g}", f"{row.tokens_per_s:,.0f}"
        times = _ms(row.compute_seconds), _ms(row.memory_seconds)
        hardware.append(
            [variant, rate, str(report.max_requests), tokens_per_s, *times, str(row.requests_alone)]
        )
    each = "per device: " if report.tensor_parallel_size > 1 else ""
    lines = [
        f"{each}memory {report.memory_gib:g} GiB, {report.memory_gb_per_s:g} GB/s; weights of all variants "
        f"{report.weights_gib:.3g} GiB, KV cache {report.kv_kib_per_token:.4g} KiB a token",
        f"decoding as many requests of {prompt} + {output} tokens as fit:",
        *table_lines(hardware, numbers=range(1, 7)),
    ]
    if report.has_sliding_window:
        lines.append(
            "note: layers with a sliding window are counted as full attention; with contexts beyond the "
            "window more requests fit, and decoding is faster"
        )
    lines += ["", f"decode, ms a pass, by sequences of {report.times.context} tokens in the KV cache"]
    lines += _time_table(report.times.decode)
    lines += ["", "prefill, ms a pass, by tokens of one prompt"]
    lines += _time_table(report.times.prefill)
    lines.append("")
    for phase, unit in (("decode", "sequences"), ("prefill", "tokens")):
        winners = report.fastest[phase]
        last = winners[-1].last
        spans = ", ".join(_span(winner, last) for winner in collapse(winners, len(report.hardware)))
        bound = f", up to the {last} that fit" if last < MAX_SIZE else ""
        lines.append(f"fastest {phase} by {unit}{bound}: {spans}")
    if report.errors is not None:
        lines += ["", f"predicted against {report.measured}: median over the measured sizes, and the worst"]
        for phase, by_variant in report.errors.items():
            cells = [f"{variant} {_error(list(sizes.values()))}" for variant, sizes in by_variant.items()]
            lines.append(f"{phase}: {', '.join(cells)}")
    return "\n".join(lines)


def collapse(winners: Sequence[Winner], variants: int = 2) -> list[Winner]:
    """Merge the middle of runs in which two variants win alternately at least four times.

    In such a run the winner depends on how full the last tiles are. The merged winner is named ``either``, or
    after both variants if the model has more than two ``variants``.
    """
    spans = []
    i = 0
    while i < len(winners):
        end = i + 1  # end of the alternating winners that begin at i
        while end < len(winners) and (end < i + 2 or winners[end].variant == winners[end - 2].variant):
            end += 1
        spans.append(winners[i])
        if end - i >= 4:
            name = EITHER if variants == 2 else f"{winners[i].variant} or {winners[i + 1].variant}"
            spans.append(Winner(name, winners[i + 1].first, winners[end - 2].last))
            i = end - 1
        else:
            i += 1
    return spans


def _time_table(curves: Mapping[str, Curve]) -> list[str]:
    sizes = list(next(iter(curves.values())))
    rows = [["", *map(str, sizes)]]
    rows += [[variant, *(_ms(curve[size].median) for size in sizes)] for variant, curve in curves.items()]
    return table_lines(rows, numbers=range(1, len(sizes) + 1))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 1 else f"{1e3 * seconds:.4g}"


def _error(errors: list[float]) -> str:
    return f"{100 * median(errors):+.0f} % ({100 * max(errors, key=abs):+.0f} %)"


def _span(winner: Winner, last: int) -> str:
    if winner.last == last:
        return f"{winner.variant} from {winner.first}"
    size = str(winner.first) if winner.first == winner.last else f"{winner.first}-{winner.last}"
    return f"{winner.variant} {size}"
