# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Plot the time of a pass over its size, for every variant, with the crossovers."""

from __future__ import annotations

from pathlib import Path

from flexquant.documents.figures import new_figure
from flexquant.policy.pass_times import PassTimes
from flexquant.tuning.deciding import Decision


def save_tuning_plot(times: PassTimes, decision: Decision, title: str, file: Path) -> None:
    """Draw decode and prefill side by side, with logarithmic axes, into the PNG ``file``.

    Raises MatplotlibMissing without matplotlib.
    """
    figure, canvas = new_figure(10, 4.5)
    panels = (("decode", "sequences", times.decode), ("prefill", "tokens", times.prefill))
    for axes, (phase, unit, curves) in zip(figure.subplots(1, 2), panels, strict=True):
        for marker, (variant, curve) in zip("osD^vPX", curves.items(), strict=False):
            medians = [1e3 * t.median for t in curve.values()]
            errors = [
                [1e3 * (t.median - t.low) for t in curve.values()],
                [1e3 * (t.high - t.median) for t in curve.values()],
            ]
            axes.errorbar(list(curve), medians, yerr=errors, marker=marker, capsize=3, label=variant)
        for r in decision.ranges[phase]:
            if r.last is not None:
                axes.axvline(r.last + 0.5, color="gray", linestyle="--")
                axes.annotate(f"{r.last}", (r.last, 0.97), xycoords=axes.get_xaxis_transform(), ha="right")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda size, _: f"{size:g}")
        axes.set_xlabel(f"{unit} in a {phase} pass")
        axes.set_ylabel("ms")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    canvas.print_figure(file, format="png")
