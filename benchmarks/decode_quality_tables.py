# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""For readme_tables: what layered plans, and a trigger, win back of the lowest precision's loss in decode."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.serving_tables import read
from benchmarks.table import markdown
from flexquant.sensitivity.report import RESAMPLES, estimate

FILE = "layered/layered.json"


def won_back(kl: Any, lowest: Any, highest: Any) -> tuple[float, float, float]:
    """Return the share of the KL divergence between two variants that a plan wins back, and its interval.

    The three are nats a token by row, of the same rows; the interval holds 95 % of rows drawn anew.
    """
    won, gap = np.subtract(lowest, kl), np.subtract(lowest, highest)
    draws = np.random.default_rng(0).integers(len(won), size=(RESAMPLES, len(won)))
    low, high = np.quantile(won[draws].mean(axis=1) / gap[draws].mean(axis=1), [0.025, 0.975])
    return float(won.mean() / gap.mean()), float(low), float(high)


def layered() -> str:
    """By raised layers and how they were chosen: time, KL divergence, and what is won back."""
    document = read(FILE)
    highest, lowest = (
        next(plan["kl"] for plan in document["plans"] if plan["chosen_by"] == variant)
        for variant in (document["variants"][0], document["variants"][-1])
    )
    rows = []
    for plan in document["plans"]:
        chosen_by, _, raised = plan["chosen_by"].partition(", ")
        is_variant = not raised
        share, low, high = won_back(plan["kl"], lowest, highest)
        rows.append(
            [
                f"all in {chosen_by}" if is_variant else raised,
                "" if is_variant else chosen_by,
                f"{plan['ms']:.1f}",
                str(estimate(plan["kl"])),
                "" if is_variant else f"{share:.0%} ({low:.0%} to {high:.0%})",
            ]
        )
    header = ["layers raised", "chosen by", "decode pass, ms", "KL to 16 bit (nats)", "of the gap won back"]
    return markdown(header, rows)


def trigger() -> str:
    """By trigger: the passes that it raised, its KL divergence, and that of as many evenly or at random."""
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
