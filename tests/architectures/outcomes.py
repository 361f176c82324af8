# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The possible outcomes of an architecture, the file that keeps them, and the page that shows them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results.json"
PAGE = ROOT / "flexquant" / "serving" / "ARCHITECTURES.md"

SERVED, REFUSED, STOCK_FAILS, NOT_MADE, FAILS = "served", "refused", "stock vLLM fails", "not made", "fails"
MEANINGS = {
    SERVED: "merged and served; under each variant alone the answers are those of stock vLLM",
    REFUSED: "by FlexQuant, with this message",
    STOCK_FAILS: "on a variant's own checkpoint, without FlexQuant, on this machine",
    NOT_MADE: "no small random model came about to try it with",
    FAILS: "in FlexQuant: a mistake to mend",
}


def page(results: dict[str, Any]) -> str:
    """Return the page about the results, in Markdown."""
    found = results["architectures"]
    counts = Counter(one["outcome"] for one in found.values())
    versions = results["versions"]
    lines = [
        "# Architectures",
        "",
        f"{len(found)} of the {results['text_models']} text models of vLLM {versions['vllm']}, by",
        "`python -m tests.architectures`: where transformers can make a small random model, it is quantised",
        "to W8A8 and W4A16, merged, served on a CPU, and compared with stock vLLM on each variant's own",
        "checkpoint: tokens and log-probabilities are equal. Experts stay in 16 bit here: vLLM's CPU kernels",
        "for others need AMX or zentorch. A random model has the layers of the real one, not its answers.",
        "",
        "| outcome | architectures | meaning |",
        "| --- | --- | --- |",
        *(f"| {name} | {counts[name]} | {meaning} |" for name, meaning in MEANINGS.items()),
        "",
        f"transformers {versions['transformers']}, torch {versions['torch']}; {results['machine']['cpu']}.",
        "",
        "| architecture | made of | with | outcome | reason |",
        "| --- | --- | --- | --- | --- |",
    ]
    order = list(MEANINGS)
    for name, one in sorted(
        found.items(), key=lambda item: (order.index(item[1]["outcome"]), item[0].lower())
    ):
        reason = one["reason"].replace("|", "\\|").replace("<", "&lt;")
        made_of, has = one["model_type"] or "", ", ".join(one["features"])
        lines.append(f"| {name} | {made_of} | {has} | {one['outcome']} | {reason} |")
    return "\n".join(lines) + "\n"
