# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The README's picture: FlexQuant and W4A16 over W8A8 on GPUs, times to and between tokens, on one scale.

python -m benchmarks.overview
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.speed.comparing import paired_ratios
from benchmarks.speed.live_policies import ratios
from benchmarks.speed.results import read_cells
from benchmarks.speed.tables import METRICS, by_workload
from benchmarks.speed.workloads import Workload
from flexquant.measuring.comparison import Comparison, compare

RESULTS = Path(__file__).parent / "results"
PICTURE = RESULTS / "overview.png"
SUBJECTS = {
    "w4a16": ("static W4A16 (8B: Machete, 32B: Marlin)", "#d95f02", "s"),
    "phase-batch": ("FlexQuant", "#1b7837", "o"),
}
PANELS = {"TTFT ms": "Time to first token", "TPOT ms": "Time per output token"}
TICKS = (0.7, 1, 1.5, 2, 3, 4)

Ratios = dict[str, dict[str, Comparison]]
"""Subject -> metric -> its ratio to W8A8."""


def on_h100() -> dict[str, Ratios]:
    """Return what servers side by side took at the shape of Llama-3.1-8B."""
    rows = {}
    for workload, found in by_workload(read_cells(RESULTS / "llama-3.1-8b-h100"), "serving").items():
        names = {"w4a16": "w4a16", "phase-batch": "flexquant:phase-batch"}
        rows[f"8B on H100: {describe(workload)}"] = {
            subject: {m: compare(paired_ratios(found[name], found["w8a8"], METRICS[m][0])) for m in PANELS}
            for subject, name in names.items()
        }
    return rows


def on_h200() -> dict[str, Ratios]:
    """Return what policies on one live server took at the shape of Qwen2.5-32B."""
    document = json.loads((RESULTS / "qwen2.5-32b-h200/policies.json").read_text(encoding="utf-8"))
    return {
        f"32B on H200: {describe(Workload.parse(name))}": {
            subject: {metric: compare(ratios(found, subject, metric)) for metric in PANELS}
            for subject in SUBJECTS
        }
        for name, found in document["cells"].items()
    }


def describe(workload: Workload) -> str:
    together = "a stream" if workload.rate else f"{workload.most_at_once} at once"
    return f"{together}, {workload.input} tokens in"


def draw(rows: dict[str, Ratios], file: Path) -> None:
    """Draw a line for each row and a panel for each metric; bars are 95 % intervals."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(10, 4.4), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for axes, (metric, title) in zip(
        figure.subplots(1, 2, sharex=True, sharey=True), PANELS.items(), strict=True
    ):
        axes.axvline(1, color="#33517a", linewidth=1.5, label="static W8A8, 1.0")
        for offset, (subject, (label, colour, marker)) in zip((-0.18, 0.18), SUBJECTS.items(), strict=True):
            found = [row[subject][metric] for row in rows.values()]
            places = [number + offset for number in range(len(rows))]
            errors = [[c.ratio - c.low for c in found], [c.high - c.ratio for c in found]]
            style: dict[str, Any] = {"fmt": marker, "color": colour, "markersize": 6, "capsize": 2.5}
            axes.errorbar([c.ratio for c in found], places, xerr=errors, label=label, **style)
            for comparison, place in zip(found, places, strict=True):
                at = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": "small"}
                axes.annotate(f"{comparison.ratio:.2f}", (comparison.high, place), color=colour, **at)
        axes.set_title(title, fontsize="medium")
        axes.set_xscale("log")
        axes.set_xlim(0.6, 5)
        axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(
            "time as a ratio to static W8A8 (logarithmic; left of 1.0 is faster)", fontsize="small"
        )
        axes.set_yticks(range(len(rows)), list(rows), fontsize="small")
        axes.grid(axis="x", alpha=0.3)
        for number in range(1, len(rows)):
            axes.axhline(number - 0.5, color="#dddddd", linewidth=0.8)
    axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    draw(on_h100() | on_h200(), PICTURE)
