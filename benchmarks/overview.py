# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The README's picture, from a speed run: FlexQuant beside both static variants.

python -m benchmarks.overview
"""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.speed.comparing import Measured
from benchmarks.speed.results import read_cells
from benchmarks.speed.tables import METRICS, by_workload
from benchmarks.speed.workloads import Workload

RUN = Path(__file__).parent / "results" / "llama-3.1-8b-h100"
PICTURE = RUN / "overview.png"
BARS = {
    "w8a8": ("static W8A8", "#4878a8"),
    "w4a16": ("static W4A16", "#e08214"),
    "flexquant:phase-batch": ("FlexQuant, both in one", "#2a9d5c"),
}
PANELS = {"TTFT ms": "time to first token (prefill), ms", "TPOT ms": "time per output token (decode), ms"}
WIDTH = 0.26


def draw(measured: Measured, file: Path) -> None:
    """Draw medians over the rounds in milliseconds, as shares of the slower static variant."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (metric, title) in zip(figure.subplots(1, 2, sharey=True), PANELS.items(), strict=True):
        get = METRICS[metric][0]
        for place, subjects in enumerate(measured.values()):
            medians = {name: statistics.median(map(get, subjects[name].values())) for name in BARS}
            slowest = max(medians["w8a8"], medians["w4a16"])
            for number, (name, (label, colour)) in enumerate(BARS.items()):
                x, share = place + (number - 1) * WIDTH, medians[name] / slowest
                axes.bar(x, share, WIDTH * 0.92, color=colour, label=label if place == 0 else None)
                axes.annotate(
                    f"{medians[name]:.3g}", (x, share), ha="center", va="bottom", fontsize="x-small"
                )
        axes.set_title(title, fontsize="medium")
        axes.set_xticks(
            range(len(measured)), [_describe(workload) for workload in measured], fontsize="small"
        )
        axes.set_ylim(0, 1.3)
        axes.set_yticks([])
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(file, dpi=110)


def _describe(workload: Workload) -> str:
    together = "a stream" if workload.rate is not None else f"{workload.most_at_once} at once"
    return f"{together}\n{workload.input} in, {workload.output} out"


if __name__ == "__main__":
    draw(by_workload(read_cells(RUN), "serving"), PICTURE)
