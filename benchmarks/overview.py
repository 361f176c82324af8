# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Draw the README's picture: one live server's policies at the shape of a 32B model on an H200.

python -m benchmarks.overview
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
RUN = RESULTS / "qwen2.5-32b-h200" / "policies.json"
PICTURE = RESULTS / "overview.png"
BARS = {
    "w8a8": ("W8A8 alone (CUTLASS)", "#4878a8"),
    "w4a16": ("W4A16 alone (Marlin)", "#e08214"),
    "one-copy": ("FlexQuant, one INT4 copy", "#9fd3b6"),
    "phase-batch": ("FlexQuant, both variants", "#2a9d5c"),
}
WORKLOADS = {"3x2048+4/1": "one prompt of 2,048 tokens", "32x512+32": "32 prompts of 512 tokens"}
METRICS = {"median_ttft_ms": "time to first token", "median_tpot_ms": "time per output token"}


def draw(run: Path, file: Path) -> None:
    """Draw medians over the rounds, with the lowest and highest; every axis begins at 0 ms."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = json.loads(run.read_text(encoding="utf-8"))["cells"]
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = [(workload, metric) for metric in METRICS for workload in WORKLOADS]
    for axes, (workload, metric) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for place, (policy, (label, colour)) in enumerate(BARS.items()):
            rounds = [cell[metric] for cell in cells[workload][policy]]
            median = statistics.median(rounds)
            spread = [[median - min(rounds)], [max(rounds) - median]]
            axes.bar(place, median, 0.8, color=colour, label=label, yerr=spread, ecolor="#444444", capsize=2)
            axes.annotate(
                f"{median:,.{0 if median >= 100 else 1}f}",
                (place, max(rounds)),
                ha="center",
                va="bottom",
                fontsize="small",
            )
        axes.set_title(f"{METRICS[metric]}\n{WORKLOADS[workload]}", fontsize="small")
        axes.set_ylabel("milliseconds", fontsize="small")
        axes.tick_params(labelsize="small")
        axes.set_xticks([])
        axes.margins(y=0.12)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(BARS))
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    draw(RUN, PICTURE)
