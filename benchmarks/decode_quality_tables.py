# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""README tables of how much of the lowest precision's decode loss layered plans and a trigger win back."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.serving_tables import read
from benchmarks.table import markdown
from flexquant.layers.sensitivity_report import RESAMPLES, estimate

FILE = "layered/layered.json"


def won_back(kl: Any, lowest: Any, highest: Any) -> tuple[float, float, float]:
    """Return the share of the KL divergence between two variants that a plan wins back, and its interval.

    The arguments are KL divergences in nats a token, each over the same rows. The interval is a 95 %
    bootstrap interval over rows.
    """
    won, gap = np.subtract(lowest, kl), np.subtract(lowest, highest)
    draws = np.random.default_rng(0).integers(len(won), size=(RESAMPLES, len(won)))
    low, high = np.quantile(won[draws].mean(axis=1) / gap[draws].mean(axis=1), [0.025, 0.975])
    return float(won.mean() / gap.mean()), float(low), float(high)


def layered() -> str:
    """Return KL divergence and share won back, by how layers were chosen and how many are raised."""
    document = read(FILE)
    highest, lowest = (
        next(plan for plan in document["plans"] if plan["chosen_by"] == variant)
        for variant in (document["variants"][0], document["variants"][-1])
    )
    cells: dict[str, dict[str, str]] = {}
    times: dict[str, dict[str, None]] = {}
    for plan in document["plans"]:
        chosen_by, _, raised = plan["chosen_by"].partition(", ")
        if raised:
            share, low, high = won_back(plan["kl"], lowest["kl"], highest["kl"])
            cells.setdefault(chosen_by, {})[raised] = (
                f"{estimate(plan['kl'])}: {share:.0%} ({low:.0%} to {high:.0%})"
            )
            times.setdefault(raised, {})[f"{plan['ms']:.1f}"] = None
    header = [f"{raised} layers, {' to '.join(ms)} ms" for raised, ms in times.items()]
    rows = [[chosen_by, *(found[raised] for raised in times)] for chosen_by, found in cells.items()]
    ends = "; ".join(
        f"all layers in {plan['chosen_by']}: {estimate(plan['kl'])} nats, {plan['ms']:.1f} ms"
        for plan in (lowest, highest)
    )
    return f"{markdown(['chosen by', *header], rows)}\n\nFor comparison, {ends}."


def trigger() -> str:
    """Return a row for each trigger: passes raised, KL divergence, and that of even and random schedules."""
    document = read("trigger.json")
    quality = document["quality"]

    def told(name: str) -> str:
        return f"{quality[name]['mean_kl']:.4f} ± {quality[name]['mean_kl_error']:.4f}"

    rows = [["none (`phase`)", "0 %", told("phase"), "", ""]]
    for name, raised in document["raised"].items():
        draws = [n for n in quality if n.startswith(f"{name}, random")]
        drawn = ", ".join(f"{quality[n]['mean_kl']:.4f}" for n in draws)
        rows.append([name, f"{raised / document['passes']:.0%}", told(name), told(f"{name}, evenly"), drawn])
    rows.append(["all (`w8a8`)", "100 %", told("w8a8"), "", ""])
    header = [
        "raised by",
        "of the passes",
        "KL to 16 bit (nats)",
        "as many, evenly spaced",
        "at random, each draw",
    ]
    return markdown(header, rows)
