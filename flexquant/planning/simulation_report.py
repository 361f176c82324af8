# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Summarise a replay in the metrics of ``vllm bench serve``, under its names, and format them as a table.

Definitions (``vllm/benchmarks/serve.py``): TTFT is the time from arrival to the first token. TPOT is the time
from the first to the last token, divided by the number of tokens after the first; requests with one token
have none. ITL is the time between two consecutive tokens. Throughput is taken over the makespan, the time
from the first arrival to the last token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flexquant.checkpoint.model_config import JsonObject
from flexquant.documents.results import table_lines
from flexquant.planning.replaying import Replay

COLUMNS = {
    "mean_ttft_ms": ("TTFT ms", "mean"),
    "median_ttft_ms": ("", "median"),
    "p99_ttft_ms": ("", "p99"),
    "mean_tpot_ms": ("TPOT ms", "mean"),
    "median_tpot_ms": ("", "median"),
    "p99_tpot_ms": ("", "p99"),
    "p99_itl_ms": ("ITL ms", "p99"),
    "output_throughput": ("output", "tokens/s"),
    "request_throughput": ("", "requests/s"),
    "makespan_s": ("makespan", "s"),
}
"""Metric -> its two lines of heading in the table; these metrics are compared."""


def summarise_replay(replay: Replay) -> JsonObject:
    """Return the metrics of a replay as JSON-able data; None for a metric that no request has.

    ``passes`` holds, by phase and plan, the number of passes and their share of all passes' time.
    ``time_per_plan`` holds the shares by plan. ``busy`` is the passes' share of the makespan.
    """
    served = replay.sequences
    start = min(s.request.arrival for s in served)
    makespan = max(s.last_token for s in served) - start
    tpots = [(s.last_token - s.first_token) / (s.request.output - 1) for s in served if s.request.output > 1]
    groups: dict[tuple[str, str], list[float]] = {}
    for one in replay.passes:
        groups.setdefault((one.phase, one.plan), []).append(one.seconds)
    busy = sum(one.seconds for one in replay.passes)
    passes = [
        {
            "phase": phase,
            "plan": plan,
            "passes": len(times),
            "seconds": sum(times),
            "share": sum(times) / busy,
        }
        for (phase, plan), times in sorted(groups.items())
    ]
    return {
        **_statistics("ttft", [s.first_token - s.request.arrival for s in served]),
        **_statistics("tpot", tpots),
        **_statistics("itl", replay.gaps),
        "output_throughput": sum(s.generated for s in served) / makespan,
        "request_throughput": len(served) / makespan,
        "makespan_s": makespan,
        "busy": busy / makespan,
        "preemptions": sum(s.preemptions for s in served),
        "time_per_plan": {
            plan: sum(row["share"] for row in passes if row["plan"] == plan)
            for plan in dict.fromkeys(row["plan"] for row in passes)
        },
        "passes": passes,
    }


def ratios_to_first(results: Mapping[str, JsonObject]) -> dict[str, dict[str, float | None]]:
    """Return, by policy, each metric of :data:`COLUMNS` divided by the first policy's."""
    first = next(iter(results.values()))
    return {
        name: {key: None if result[key] is None else result[key] / first[key] for key in COLUMNS}
        for name, result in results.items()
    }


def format_simulation_table(results: Mapping[str, JsonObject]) -> str:
    """Return the metrics, their ratios to the first policy's, and each policy's time per plan, as tables."""
    names = list(results)
    rows = [
        ["", *(top for top, _ in COLUMNS.values())],
        ["policy", *(below for _, below in COLUMNS.values())],
    ]
    rows += [[name, *(_number(result[key]) for key in COLUMNS)] for name, result in results.items()]
    if len(names) > 1:
        rows.append([f"relative to {names[0]}", *[""] * len(COLUMNS)])
        ratios = ratios_to_first(results)
        rows += [[name, *(_ratio(ratios[name][key]) for key in COLUMNS)] for name in names[1:]]
    width = max(len(row[0]) for row in rows)
    plans = [[f"{name:{width}}", _plans(result)] for name, result in results.items()]
    numbers = range(1, len(COLUMNS) + 1)
    return "\n".join([*table_lines(rows, numbers), "time per plan", *table_lines(plans)])


def _plans(result: JsonObject) -> str:
    texts = []
    for plan, share in result["time_per_plan"].items():
        counts = ", ".join(
            f"{row['passes']} {row['phase']}" for row in result["passes"] if row["plan"] == plan
        )
        texts.append(f"{plan} {share:.0%} ({counts})")
    preemptions = f"; {result['preemptions']} preemptions" if result["preemptions"] else ""
    return f"{', '.join(texts)}; busy {result['busy']:.0%}{preemptions}"


def _statistics(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    keys = (f"mean_{name}_ms", f"median_{name}_ms", f"p99_{name}_ms")
    if not len(seconds):
        return dict.fromkeys(keys)
    milliseconds = 1e3 * np.asarray(seconds)
    values = (milliseconds.mean(), *np.percentile(milliseconds, (50, 99)))
    return {key: float(value) for key, value in zip(keys, values, strict=True)}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
