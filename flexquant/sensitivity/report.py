# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a layer costs and wins: differences of KL divergence between plans, with intervals over the rows.

All plans were scored on the same rows, so that their differences are taken row by row. Intervals hold 95 %
of the means of rows drawn anew with replacement (B. Efron, R. Tibshirani, An Introduction to the Bootstrap,
13), seeded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flexquant.errors import FlexQuantError
from flexquant.sensitivity.measuring import LOWERED, RAISED, plan_name

RESAMPLES = 10_000


@dataclass(frozen=True)
class Estimate:
    """A mean over rows, in nats a token, and the ends of its interval; with one row they are infinite."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2g} ({self.low:.2g} to {self.high:.2g})"


@dataclass(frozen=True)
class LayerEffect:
    layer: int
    costs: Estimate
    """What the KL divergence grows by when this layer alone is in the lower precision."""
    wins: Estimate
    """What it shrinks by when this layer alone is in the higher precision."""


def estimate(rows: Any) -> Estimate:
    """Return the mean of ``rows``, numbers by row, with its interval."""
    values = np.asarray(rows, dtype=np.float64)
    if len(values) < 2:
        return Estimate(float(values.mean()), -np.inf, np.inf)
    draws = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[draws].mean(axis=1), [0.025, 0.975])
    return Estimate(float(values.mean()), float(low), float(high))


def layer_effects(document: dict[str, Any]) -> list[LayerEffect]:
    """Return what every layer costs and wins, in the order of the layers."""
    kl = {name: np.array(rows) for name, rows in document["kl"].items()}
    higher, lower = kl[document["higher"]], kl[document["lower"]]
    return [
        LayerEffect(
            layer,
            estimate(kl[plan_name(LOWERED, layer)] - higher),
            estimate(lower - kl[plan_name(RAISED, layer)]),
        )
        for layer in range(document["layers"])
    ]


def format_table(document: dict[str, Any]) -> str:
    """Return a Markdown table of the layers, those first that win most in the higher precision."""
    higher, lower = document["higher"], document["lower"]
    of = document["reference"] or f"{higher} itself"
    effects = sorted(layer_effects(document), key=lambda effect: effect.wins.mean, reverse=True)
    rows = [f"| {effect.layer} | {effect.costs} | {effect.wins} |" for effect in effects]
    all_higher, all_lower = (estimate(document["kl"][variant]) for variant in (higher, lower))
    return "\n".join(
        [
            f"KL divergence to {of}, nats a token: all layers in {higher} {all_higher}, "
            f"in {lower} {all_lower}.",
            "",
            f"| layer | costs in {lower}, all others in {higher} | wins in {higher}, all others in {lower} |",
            "| --- | --- | --- |",
            *rows,
        ]
    )


def save_plot(document: dict[str, Any], file: Path) -> None:
    """Draw what every layer costs and wins, as a PNG; raises FlexQuantError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as e:
        raise FlexQuantError('plots need matplotlib; install it with: pip install "flexquant[eval]"') from e
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    effects = layer_effects(document)
    higher, lower = document["higher"], document["lower"]
    for name, offset, found in (
        (f"costs in {lower}, all others in {higher}", -0.15, [effect.costs for effect in effects]),
        (f"wins in {higher}, all others in {lower}", 0.15, [effect.wins for effect in effects]),
    ):
        means = np.array([e.mean for e in found])
        apart = np.array([[e.mean - e.low for e in found], [e.high - e.mean for e in found]])
        places = np.arange(len(found)) + offset
        axes.errorbar(
            places, means, yerr=np.where(np.isfinite(apart), apart, 0), fmt="o", capsize=2, label=name
        )
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set_xlabel("decoder layer")
    axes.set_ylabel("KL divergence, nats a token")
    axes.set_title(f"{document['checkpoint']}: each layer alone in the other precision")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    canvas.print_figure(file, format="png")
