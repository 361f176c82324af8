# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""README tables of left_out.py: what INT4 loses on kinds of text that it was not calibrated on."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.serving_tables import read
from benchmarks.table import markdown

MODELS = {
    "SmolLM2-135M-Instruct": "left-out/smollm2.json",
}
"""Models -> their results."""
BEFORE, AFTER = "trained-4, share 0.5, before", "zeros-trained-4, share 0.5"
INT8 = "w8a8, share 0.5, before"


def left_out() -> str:
    """Return for each model and kind of text the loss before, and with that kind left out of what is new."""
    rows = []
    for model, file in MODELS.items():
        losses = read(file)["losses"]
        for kind in losses[BEFORE]:
            rows.append(
                [
                    model,
                    kind,
                    *(cell for label in (BEFORE, AFTER, INT8) for cell in _cells(losses[label][kind])),
                ]
            )
        means = (_mean(losses[label]) for label in (BEFORE, AFTER, INT8))
        rows.append([model, "**mean**", *(cell for mean in means for cell in mean)])
    names = ("before", "now", "W8A8")
    header = [f"{name}: {what}" for name in names for what in ("perplexity", "KL, nats")]
    return markdown(["model", "left out", *header], rows)


def _cells(loss: dict[str, Any]) -> list[str]:
    return [
        f"{loss['perplexity']:+.1%} ± {loss['perplexity_error']:.1%}",
        f"{loss['kl']:.3f} ± {loss['kl_error']:.3f}",
    ]


def _mean(losses: dict[str, dict[str, Any]]) -> list[str]:
    perplexity, kl = (
        statistics.fmean(loss[what] for loss in losses.values()) for what in ("perplexity", "kl")
    )
    return [f"{perplexity:+.1%}", f"{kl:.3f}"]


BLOCKS = (left_out,)
"""Functions, each of which returns the block of its name."""
