# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A prediction as tables for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from flexquant.pass_times import PassTimes
from flexquant.prediction.device import Device
from flexquant.prediction.model_shape import ModelShape
from flexquant.prediction.predicting import (
    MAX_SIZE,
    PHASES,
    Errors,
    HardwareRow,
    Winner,
    errors,
    fastest,
    hardware_table,
    max_requests,
    pass_times,
)

GIB = 2**30


@dataclass(frozen=True)
class Report:
    device: str
    memory_gib: float
    memory_gb_per_s: float
    tokens: tuple[int, int]
    """Of a request: prompt and output."""
    max_requests: int
    weights_gib: float
    kv_kib_per_token: float
    hardware: Mapping[str, HardwareRow]
    """By variant."""
    times: PassTimes
    fastest: Mapping[str, list[Winner]]
    """By phase."""
    errors: Errors | None
    """Predicted / measured - 1; None without a measurement."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "times": self.times.to_data()}


def make_report(
    model: ModelShape,
    device: Device,
    input_tokens: int,
    output_tokens: int,
    utilization: float,
    measured: PassTimes | None = None,
) -> Report:
    """Predict for requests of these lengths; raise FlexQuantError for a model that does not fit."""
    tokens = input_tokens + output_tokens
    context = input_tokens + output_tokens // 2
    return Report(
        device.name,
        device.memory_bytes / GIB,
        device.bytes_per_s / 1e9,
        (input_tokens, output_tokens),
        max_requests(model, device, tokens, utilization),
        model.resident_bytes / GIB,
        model.kv_bytes_per_token / 1024,
        hardware_table(model, device, context, tokens, utilization),
        pass_times(model, device, context),
        {phase: fastest(model, phase, context, device) for phase in PHASES},
        None if measured is None else errors(model, device, measured),
    )


def format_report(report: Report) -> str:
    """Return the report as text for a terminal."""
    prompt, output = report.tokens
    header = f"{'':<10}{'rate':>10}{'max':>10}{'max':>10}{'compute':>10}{'memory':>10}{'requests':>10}"
    units = f"{'':<10}{'TFLOPS':>10}{'requests':>10}{'tokens/s':>10}{'ms':>10}{'ms':>10}{'alone':>10}"
    lines = [
        f"memory {report.memory_gib:g} GiB, {report.memory_gb_per_s:g} GB/s; weights of all variants "
        f"{report.weights_gib:.3g} GiB, KV cache {report.kv_kib_per_token:.4g} KiB a token",
        f"decoding as many requests of {prompt} + {output} tokens as fit:",
        header,
        units,
    ]
    for variant, row in report.hardware.items():
        lines.append(
            f"{variant:<10}{row.rate_tflops:>10.4g}{report.max_requests:>10}{row.tokens_per_s:>10,.0f}"
            f"{_ms(row.compute_seconds):>10}{_ms(row.memory_seconds):>10}{row.requests_alone:>10}"
        )
    times = report.times
    lines += ["", f"decode, ms a pass, by sequences of {times.context} tokens in the KV cache"]
    lines += _time_table(times.decode)
    lines += ["", "prefill, ms a pass, by tokens of one prompt"]
    lines += _time_table(times.prefill)
    lines.append("")
    for phase, unit in (("decode", "sequences"), ("prefill", "tokens")):
        spans = ", ".join(_span(winner) for winner in report.fastest[phase])
        lines.append(f"fastest {phase} by {unit}: {spans}")
    if report.errors is not None:
        lines += ["", "predicted against measured: median over the measured sizes, and the worst of them"]
        for phase, by_variant in report.errors.items():
            cells = [f"{variant} {_error(list(sizes.values()))}" for variant, sizes in by_variant.items()]
            lines.append(f"{phase}: {', '.join(cells)}")
    return "\n".join(lines)


def _time_table(curves: Mapping[str, Mapping[int, Any]]) -> list[str]:
    sizes = list(next(iter(curves.values())))
    rows = [f"{'':<10}" + "".join(f"{size:>9}" for size in sizes)]
    for variant, curve in curves.items():
        rows.append(f"{variant:<10}" + "".join(f"{_ms(curve[size].median):>9}" for size in sizes))
    return rows


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 1 else f"{1e3 * seconds:.4g}"


def _error(errors: list[float]) -> str:
    return f"{100 * median(errors):+.0f} % ({100 * max(errors, key=abs):+.0f} %)"


def _span(winner: Winner) -> str:
    if winner.last == MAX_SIZE:
        return f"{winner.variant} from {winner.first}"
    size = str(winner.first) if winner.first == winner.last else f"{winner.first}-{winner.last}"
    return f"{winner.variant} {size}"
