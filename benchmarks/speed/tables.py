# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Numbers for people: Markdown tables worked out from the cells."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.result import markdown
from benchmarks.speed.comparing import (
    Measured,
    Metric,
    Rounds,
    compare_beside,
    paired_ratios,
    pairs,
    second_server,
)
from benchmarks.speed.results import Cell
from benchmarks.speed.workloads import Workload
from flexquant.evaluation.comparison import Comparison


def with_range(values: Sequence[float], form: str) -> str:
    """Return the median, and the smallest and largest if there are several."""
    text = format(statistics.median(values), form)
    if len(values) == 1:
        return text
    return f"{text} ({format(min(values), form)} – {format(max(values), form)})"


def by_workload(cells: Iterable[Cell], part: str) -> Measured:
    """Return the finished serving cells of a part, in the order in which they were first measured."""
    found: dict[Workload, dict[str, Rounds]] = {}
    for cell in cells:
        if cell["part"] == part and "result" in cell:
            p = cell["parameters"]
            rounds = found.setdefault(Workload(**p["workload"]), {}).setdefault(p["subject"], {})
            rounds[p["round"]] = cell["result"]
    return found


def prefill_ms(result: dict[str, Any]) -> float:
    """Return when the last prompt of a batch that arrived at once had its first token, ms."""
    return 1000 * max(result["ttfts"])


def decode_ms(result: dict[str, Any]) -> float:
    """Return the time of a decode pass, ms: the time per token of the request whose prompt came last.

    By then all other prompts are done, so its passes hold no prompts.
    """
    last = max(range(len(result["ttfts"])), key=result["ttfts"].__getitem__)
    return 1000 * result["tpots"][last]


METRICS: dict[str, tuple[Metric, str]] = {
    "TTFT ms": (lambda r: r["median_ttft_ms"], ".1f"),
    "TPOT ms": (lambda r: r["median_tpot_ms"], ".2f"),
    "ITL p99 ms": (lambda r: r["p99_itl_ms"], ".1f"),
    "tokens/s": (lambda r: r["output_throughput"], ".1f"),
}
"""Metrics of a round's requests, with formats: medians, the 99th percentile, and output tokens a second."""


def latency_table(measured: Measured) -> str:
    rows = []
    for workload, subjects in measured.items():
        for subject, rounds in subjects.items():
            cells = [with_range([get(r) for r in rounds.values()], form) for get, form in METRICS.values()]
            rows.append([workload.name, f"`{subject}`", *cells])
    return markdown(["requests", "subject", *METRICS], rows)


def weights_gib(started: dict[str, Any]) -> float | None:
    """Return the GiB of the weights: as FlexQuant says, else as on disk."""
    if "variant_gib" in started:
        return sum(started["variant_gib"].values())
    return started.get("checkpoint_gib")


def start_results(cells: Iterable[Cell]) -> dict[str, dict[str, Any]]:
    """Return subject -> what its start-up told."""
    return {
        cell["parameters"]["subject"]: cell["result"]
        for cell in cells
        if cell["part"] == "start" and "result" in cell
    }


def memory_table(memory: dict[str, dict[str, Any]]) -> str:
    rows = []
    for subject, started in memory.items():
        weights = weights_gib(started)
        numbers = [
            "–" if weights is None else f"{weights:.2f}",
            _optional(started.get("kv_cache_gib"), ".2f"),
            _optional(started.get("kv_cache_tokens"), ","),
            _optional(started.get("start_seconds"), ".0f"),
        ]
        rows.append([f"`{subject}`", *numbers])
    return markdown(["subject", "weights GiB", "KV cache GiB", "KV cache tokens", "start s"], rows)


RATIOS = ("TTFT ms", "TPOT ms", "tokens/s")


def said(comparison: Comparison, metric: str) -> str:
    """Return the verdict in words for a metric."""
    return comparison.words("slower", "faster") if metric == "tokens/s" else comparison.words()


def ratio_table(measured: Measured) -> str:
    """Return FlexQuant over static, by paired rounds."""
    rows = []
    for workload, subjects in measured.items():
        for subject, reference in pairs(subjects):
            cells = []
            for metric in RATIOS:
                get = METRICS[metric][0]
                ratios = paired_ratios(subjects[subject], subjects[reference], get)
                if ratios:
                    found = compare_beside(ratios, second_server(subjects, reference, get))
                    cells.append(f"{found}, {said(found, metric)}")
            if cells:
                rounds = str(len(subjects[subject].keys() & subjects[reference].keys()))
                rows.append([workload.name, f"`{subject}` / `{reference}`", *cells, rounds])
    return markdown(["requests", "ratio", *(m.removesuffix(" ms") for m in RATIOS), "rounds"], rows)


def kernel_results(cells: Iterable[Cell]) -> dict[tuple[str, int, int], dict[int, dict[str, Any]]]:
    """Return (layer, outputs, inputs) -> tokens -> scheme -> what was measured."""
    found: dict[tuple[str, int, int], dict[int, dict[str, Any]]] = {}
    for cell in cells:
        if cell["part"] == "kernels" and "result" in cell:
            p = cell["parameters"]
            layer = found.setdefault((p["layer"], p["outputs"], p["inputs"]), {})
            layer[p["tokens"]] = {**layer.get(p["tokens"], {}), **cell["result"]}
    return found


def kernel_table(by_tokens: dict[int, dict[str, Any]]) -> str:
    """Return one layer's table: tokens x scheme -> microseconds, GB/s, TFLOP/s."""
    schemes = list(dict.fromkeys(scheme for found in by_tokens.values() for scheme in found))
    rows = []
    for tokens, found in sorted(by_tokens.items()):
        rows.append([str(tokens), *(_kernel_cell(found.get(scheme)) for scheme in schemes)])
    return markdown(["tokens", *schemes], rows)


def _kernel_cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    if "unavailable" in found:
        return "no kernel"
    low, high = found["microseconds_quartiles"]
    return (
        f"{found['microseconds']:.4g} µs ({low:.4g} – {high:.4g}), "
        f"{found['gb_per_s']:.3g} GB/s, {found['tflop_per_s']:.3g} TFLOP/s"
    )


def _optional(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
