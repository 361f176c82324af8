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
WAYS = {
    "nearest": "to the nearest value",
    "gptq": "GPTQ",
    "damped": "..., damped by a tenth",
    "more-damped": "..., damped by half",
    "awq": "..., after AWQ's scaling",
    "spared": "..., 5 % of the weights in W8A8",
    "trained-1": "..., scales trained for an epoch",
    "trained-4": "..., scales trained for four epochs",
    "zeros": "GPTQ with zero points",
    "zeros-trained-4": "..., scales trained for four epochs",
    "w8a8": "W8A8",
}
"""Variants of recipes/left_out.yaml -> what they are called."""


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
    for way, name in WAYS.items():
        label = f"{way}, share 0.5, before"
        found = (_mean(of[label]) if label in of else ["", ""] for of in losses.values())
        rows.append([name, *(cell for cells in found for cell in cells)])
    header = [f"{model}: {what}" for model in MODELS for what in ("perplexity", "KL, nats")]
    return markdown(["how", *header], rows)


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
