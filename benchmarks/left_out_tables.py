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
    "Qwen3": "left-out/qwen3.json",
    "Phi-3": "left-out/phi3.json",
}
"""Models -> their results."""
BEFORE, AFTER = "trained-4, share 0.5, before", "zeros-trained-4, share 0.5"
INT8 = "w8a8, share 0.5, before"
SYMMETRIC, ZEROS = 4.5 / 8, 4.625 / 8
WAYS = {
    "nearest": ("to the nearest value", SYMMETRIC),
    "gptq": ("GPTQ", SYMMETRIC),
    "damped": ("GPTQ, damped by a tenth", SYMMETRIC),
    "more-damped": ("GPTQ, damped by half", SYMMETRIC),
    "awq": ("GPTQ after AWQ's scaling", SYMMETRIC),
    "trained-1": ("GPTQ, scales trained for an epoch", SYMMETRIC),
    "trained-4": ("GPTQ, scales trained for four epochs", SYMMETRIC),
    "spared": ("GPTQ, 5 % of the weights in 8 bit", 0.95 * SYMMETRIC + 0.05),
    "zeros": ("GPTQ, zero points", ZEROS),
    "zeros-damped": ("GPTQ, zero points, damped by a tenth", ZEROS),
    "zeros-trained-4": ("GPTQ, zero points, scales trained for four epochs", ZEROS),
    "w8a8-unsmoothed": ("W8A8 without SmoothQuant", 1.0),
    "w8a8": ("W8A8", 1.0),
}
"""Variants of recipes/left_out.yaml -> what they are called, and their bytes a weight."""


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


def left_out_ways() -> str:
    """Return for each way to quantise the mean loss over all kinds of text, calibrated on none of them."""
    losses = {model: read(file)["losses"] for model, file in MODELS.items()}
    rows = []
    for way, (name, size) in WAYS.items():
        label = f"{way}, share 0.5, before"
        found = (_mean(of[label]) if label in of else ["", ""] for of in losses.values())
        rows.append([name, f"{size:.3f}", *(cell for cells in found for cell in cells)])
    header = [f"{model}: {what}" for model in MODELS for what in ("perplexity", "KL, nats")]
    return markdown(["how", "bytes a weight", *header], rows)


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


BLOCKS = (left_out, left_out_ways)
"""Functions, each of which returns the block of its name."""
