# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The same numbers as pictures (PNG); needs matplotlib, which a measuring machine may lack."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.speed.comparing import Measured, paired_ratios, pairs
from benchmarks.speed.results import Cell
from benchmarks.speed.tables import METRICS, by_workload, kernel_results
from flexquant.measuring.comparison import compare

MARKERS = "osD^vPX<>*"


def draw_plots(cells: Sequence[Cell], folder: Path, title: str) -> list[str]:
    """Draw what the cells allow; return the files' names. Raises ImportError without matplotlib."""
    figures: dict[str, Any] = {}
    if kernels := kernel_results(cells):
        figures["kernels"] = _kernels(kernels)
    for part in ("serving", "overhead"):
        if measured := by_workload(cells, part):
            figures[part] = _serving(measured) if part == "serving" else _overhead(measured)
    for name, figure in figures.items():
        figure.suptitle(title, fontsize="medium")
        figure.savefig(folder / f"{name}.png", dpi=120)
    return [f"{name}.png" for name in figures]


def _figure(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _legend(figure: Any, axes: Any) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")


def _kernels(results: dict[tuple[str, int, int], dict[int, dict[str, Any]]]) -> Any:
    """Draw TFLOP/s and GB/s over the number of tokens, one column a layer."""
    figure, axes = _figure(2, len(results), 3.6, 3)
    for column, ((layer, outputs, inputs), by_tokens) in enumerate(results.items()):
        schemes = list(dict.fromkeys(scheme for found in by_tokens.values() for scheme in found))
        for row, (key, unit) in enumerate((("tflop_per_s", "TFLOP/s"), ("gb_per_s", "GB/s"))):
            ax = axes[row][column]
            for marker, scheme in zip(cycle(MARKERS), schemes, strict=False):
                points = [
                    (tokens, found[scheme][key])
                    for tokens, found in sorted(by_tokens.items())
                    if key in found.get(scheme, {})
                ]
                if points:
                    ax.plot(*zip(*points, strict=True), marker=marker, markersize=4, label=scheme)
            ax.set_xscale("log", base=2)
            ax.set_xticks(sorted(by_tokens), [str(tokens) for tokens in sorted(by_tokens)], rotation=90)
            _log_scale(ax)
            ax.grid(alpha=0.3)
            ax.set_xlabel("tokens")
            ax.set_ylabel(unit)
        axes[0][column].set_title(f"{layer}, {inputs} to {outputs}", fontsize="small")
    _legend(figure, axes[0][0])
    return figure


def _serving(measured: Measured) -> Any:
    """Draw the median over rounds, with the range, for every workload and subject; one panel a metric."""
    names = ["TTFT ms", "TPOT ms", "tokens/s"]
    figure, axes = _figure(len(names), 1, max(7.0, 1.3 * len(measured)), 2.6)
    subjects = list(dict.fromkeys(subject for found in measured.values() for subject in found))
    for (ax,), name in zip(axes, names, strict=True):
        get = METRICS[name][0]
        for number, (marker, subject) in enumerate(zip(cycle(MARKERS), subjects, strict=False)):
            groups = []
            for x, found in enumerate(measured.values()):
                values = [get(r) for r in found.get(subject, {}).values()]
                groups += [(x, statistics.median(values), min(values), max(values))] if values else []
            _points(ax, groups, _offset(number, len(subjects)), marker, subject)
        _log_scale(ax)
        ax.set_ylabel(name)
        _label_workloads(ax, measured)
    _legend(figure, axes[0][0])
    return figure


def _overhead(measured: Measured) -> Any:
    """Draw FlexQuant over static with the interval, and a line at 1, for TTFT and TPOT."""
    figure, axes = _figure(2, 1, max(7.0, 1.3 * len(measured)), 2.4)
    subjects = dict.fromkeys(subject for found in measured.values() for subject in found)
    compared = pairs(list(subjects), constant=True)
    for (ax,), name in zip(axes, ("TTFT ms", "TPOT ms"), strict=True):
        for number, (marker, (subject, reference)) in enumerate(zip(cycle(MARKERS), compared, strict=False)):
            groups = []
            for x, found in enumerate(measured.values()):
                ratios = paired_ratios(found.get(subject, {}), found.get(reference, {}), METRICS[name][0])
                if ratios:
                    comparison = compare(ratios)
                    groups.append((x, comparison.ratio, comparison.low, comparison.high))
            _points(ax, groups, _offset(number, len(compared)), marker, f"{subject} / {reference}")
        ax.axhline(1, color="gray", linewidth=1)
        ax.set_ylabel(f"{name.removesuffix(' ms')} ratio")
        _label_workloads(ax, measured)
    _legend(figure, axes[0][0])
    return figure


def _points(
    ax: Any, groups: Sequence[tuple[int, float, float, float]], offset: float, marker: str, label: str
) -> None:
    """Draw, for each position, a value with the ends of its bar."""
    x = [position + offset for position, *_ in groups]
    errors = [[value - low for _, value, low, _ in groups], [high - value for _, value, _, high in groups]]
    middles = [value for _, value, *_ in groups]
    ax.errorbar(x, middles, yerr=errors, fmt=marker, markersize=5, capsize=2, label=label)


def _log_scale(ax: Any) -> None:
    """Make the y axis logarithmic, with plain numbers."""
    from matplotlib.ticker import FuncFormatter

    ax.set_yscale("log")
    for set_formatter in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
        set_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.tick_params(axis="y", which="minor", labelsize="x-small")


def _offset(number: int, count: int) -> float:
    """Return the offset of a subject, so that those of one workload spread over six tenths of its place."""
    return 0.6 * ((number + 0.5) / count - 0.5)


def _label_workloads(ax: Any, measured: Measured) -> None:
    ax.set_xticks(range(len(measured)), [workload.name for workload in measured], fontsize="small")
    ax.set_xlim(-0.5, len(measured) - 0.5)
    ax.grid(alpha=0.3, axis="y")
