# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Numbers for people: Markdown tables worked out from the cells."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.speed.results import Cell
from benchmarks.speed.subjects import AGAIN, FLEXQUANT, STATIC
from benchmarks.speed.workloads import Workload

Rounds = dict[int, dict[str, Any]]
"""Round -> the result of ``vllm bench serve``."""
Measured = dict[Workload, dict[str, Rounds]]
"""Workload -> subject -> rounds."""


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def with_range(values: Sequence[float], form: str) -> str:
    """Return the median, and the smallest and largest if there are several."""
    text = format(statistics.median(values), form)
    if len(values) == 1:
        return text
    return f"{text} ({format(min(values), form)} – {format(max(values), form)})"


def by_workload(cells: Iterable[Cell], part: str) -> Measured:
    """Return the finished serving cells of a part, in the order in which they were first measured."""
    found: Measured = {}
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


METRICS: dict[str, tuple[Callable[[dict[str, Any]], float], str]] = {
    "TTFT ms": (lambda r: r["median_ttft_ms"], ".1f"),
    "TPOT ms": (lambda r: r["median_tpot_ms"], ".2f"),
    "ITL p99 ms": (lambda r: r["p99_itl_ms"], ".1f"),
    "tokens/s": (lambda r: r["output_throughput"], ".1f"),
}
"""Of the requests of a round: medians, the 99th percentile, and generated tokens over the duration."""


def latency_table(measured: Measured) -> str:
    rows = []
    for workload, subjects in measured.items():
        for subject, rounds in subjects.items():
            cells = [with_range([get(r) for r in rounds.values()], form) for get, form in METRICS.values()]
            rows.append([workload.name, f"`{subject}`", *cells])
    return markdown(["requests", "subject", *METRICS], rows)


def batch_table(measured: Measured, memory: dict[str, dict[str, Any]]) -> str:
    """Return the table batch x input x output -> prefill ms, decode ms, tokens/s, GiB."""
    rows = []
    for workload, subjects in measured.items():
        if workload.rate is not None:
            continue
        for subject, rounds in subjects.items():
            times = [
                with_range([get(r) for r in rounds.values()], form)
                for get, form in ((prefill_ms, ".1f"), (decode_ms, ".2f"), METRICS["tokens/s"])
            ]
            gib = used_gib(workload, memory.get(subject, {}))
            sizes = [str(n) for n in (workload.requests, workload.input, workload.output)]
            rows.append([*sizes, f"`{subject}`", *times, "–" if gib is None else f"{gib:.2f}"])
    header = ["batch", "input", "output", "subject", "prefill ms", "decode ms", "tokens/s", "GiB"]
    return markdown(header, rows)


def used_gib(workload: Workload, started: dict[str, Any]) -> float | None:
    """Return the GiB of the weights and of the batch's KV cache at its end; None if a size is unknown."""
    weights, per_token = weights_gib(started), kv_gib_per_token(started)
    if weights is None or per_token is None:
        return None
    return weights + per_token * workload.requests * (workload.input + workload.output)


def weights_gib(started: dict[str, Any]) -> float | None:
    """Return the GiB of the weights: as vLLM says; on a CPU as FlexQuant says, else as on disk."""
    if "weights_gib" in started:
        return started["weights_gib"]
    if "variant_gib" in started:
        return sum(started["variant_gib"].values())
    return started.get("checkpoint_gib")


def kv_gib_per_token(started: dict[str, Any]) -> float | None:
    if not started.get("kv_cache_gib") or not started.get("kv_cache_tokens"):
        return None
    return started["kv_cache_gib"] / started["kv_cache_tokens"]


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
            *(_optional(started.get(name), ".2f") for name in ("kv_cache_gib", "graph_gib")),
            _optional(started.get("kv_cache_tokens"), ","),
            *(
                _optional(started.get(n), ".0f")
                for n in ("start_seconds", "compile_seconds", "graph_seconds")
            ),
        ]
        rows.append([f"`{subject}`", *numbers, ", ".join(started["kernels"]) or "–"])
    sizes = ["weights GiB", "KV cache GiB", "graphs GiB", "KV cache tokens"]
    times = ["start s", "compile s", "capture s"]
    return markdown(["subject", *sizes, *times, "linear kernels"], rows)


def paired_ratios(rounds: Rounds, reference: Rounds, get: Callable[[dict[str, Any]], float]) -> list[float]:
    """Return subject over reference for every round that both have."""
    return [get(rounds[n]) / get(reference[n]) for n in sorted(rounds.keys() & reference.keys())]


def ratio_table(measured: Measured, constant: bool) -> str:
    """Return FlexQuant over static, as the median of paired rounds.

    ``constant``: each constant policy against its own static checkpoint; else all other pairs.
    """
    metrics = ["TTFT ms", "TPOT ms", "tokens/s"]
    rows = []
    for workload, subjects in measured.items():
        for subject, reference in comparisons(list(subjects), constant):
            ratios = [
                paired_ratios(subjects[subject], subjects[reference], METRICS[metric][0])
                for metric in metrics
            ]
            if not ratios[0]:
                continue
            cells = [with_range(values, ".3f") for values in ratios]
            rows.append([workload.name, f"`{subject}` / `{reference}`", *cells, str(len(ratios[0]))])
    return markdown(["requests", "ratio", *(m.removesuffix(" ms") for m in metrics), "rounds"], rows)


def best_static_table(measured: Measured) -> str:
    """Return FlexQuant over the best static variant for each metric, as the median of paired rounds."""
    rows = []
    for workload, subjects in measured.items():
        for subject in routed(subjects):
            cells = []
            for get in (METRICS[metric][0] for metric in ("TTFT ms", "TPOT ms")):
                best = best_static(subjects, get)
                ratios = paired_ratios(subjects[subject], subjects[best], get)
                again = second_server(subjects, best, get)
                off = with_range(again, ".3f") if again else "–"
                cells += [f"`{best}`", with_range(ratios, ".3f"), off, verdict(ratios, again)]
            rows.append([workload.name, f"`{subject}`", *cells])
    metrics = ([f"best {m}", f"{m} ratio", "the best again", m] for m in ("TTFT", "TPOT"))
    return markdown(["requests", "subject", *(name for header in metrics for name in header)], rows)


def routed(subjects: Iterable[str]) -> list[str]:
    """Return FlexQuant's subjects that are no constant policy beside its static checkpoint."""
    return list(dict.fromkeys(subject for subject, _ in comparisons(list(subjects), constant=False)))


def best_static(subjects: dict[str, Rounds], get: Callable[[dict[str, Any]], float]) -> str:
    """Return the static subject with the smallest median."""
    statics = [s for s in STATIC if s in subjects]
    return min(statics, key=lambda s: statistics.median(map(get, subjects[s].values())))


def second_server(
    subjects: dict[str, Rounds], static: str, get: Callable[[dict[str, Any]], float]
) -> list[float]:
    """Return, for every round, the second server of a static subject over the first."""
    return paired_ratios(subjects.get(static + AGAIN, {}), subjects[static], get)


def verdict(ratios: Sequence[float], again: Sequence[float] = ()) -> str:
    """Say whether all rounds were slower, all faster, or some slower and some faster; of 3 rounds or more.

    A median that the ratios ``again`` of two servers of the same subject reach in some round is noise too.
    """
    if len(ratios) < 3:
        return "too few rounds"
    median = statistics.median(ratios)
    if min(ratios) > 1 and median > max(again, default=1):
        return "slower"
    if max(ratios) < 1 and median < min(again, default=1):
        return "faster"
    return "within noise"


def comparisons(subjects: Sequence[str], constant: bool) -> list[tuple[str, str]]:
    """Return (FlexQuant subject, static subject) pairs that are worth a ratio."""
    return [
        (subject, static)
        for subject in subjects
        if subject.startswith(FLEXQUANT)
        for static in STATIC
        if static in subjects
        and (
            subject.removeprefix(FLEXQUANT) == static
            if constant
            else subject.removeprefix(FLEXQUANT) not in STATIC
        )
    ]


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
