# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The possible outcomes of an architecture, the file that keeps them, and the page that shows them."""

from collections import Counter
from pathlib import Path
from textwrap import shorten
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results.json"
PAGE = ROOT / "flexquant" / "serving" / "ARCHITECTURES.md"

SERVED, REFUSED, STOCK_FAILS, NOT_MADE, FAILS = "served", "refused", "stock vLLM fails", "not made", "fails"
MEANINGS = {
    SERVED: "each variant alone answers as stock vLLM",
    REFUSED: "by FlexQuant, with this message",
    STOCK_FAILS: "on a variant's checkpoint, on this machine",
    NOT_MADE: "no small random model could be made",
    FAILS: "in FlexQuant: a mistake to mend",
}
LONGEST = 120
"""Most characters of a reason on the page."""


def page(results: dict[str, Any]) -> str:
    """Return the page about the results, in Markdown."""
    found = results["architectures"]
    counts = Counter(one["outcome"] for one in found.values())
    versions = results["versions"]
    lines = [
        "# Architectures",
        "",
        f"`python -m tests.architectures` tried {len(found)} of the {results['text_models']} text models of",
        f"vLLM {versions['vllm']} on a CPU: small random models, quantised to W8A8 and W4A16 (experts stay",
        "in 16 bit), merged, served, and compared in tokens and log-probabilities with stock vLLM on each",
        "variant's checkpoint. `tests/architectures/results.json` has features and reasons in full.",
        "",
        "| outcome | architectures | meaning |",
        "| --- | --- | --- |",
        *(f"| {name} | {counts[name]} | {meaning} |" for name, meaning in MEANINGS.items()),
        "",
        f"transformers {versions['transformers']}, torch {versions['torch']}; {results['machine']['cpu']}.",
    ]
    for outcome in (name for name in MEANINGS if counts[name]):
        names = sorted((name for name in found if found[name]["outcome"] == outcome), key=str.lower)
        lines += ["", f"## {outcome[0].upper()}{outcome[1:]}", ""]
        if outcome == REFUSED:
            lines += ["| architecture | reason |", "| --- | --- |"]
            lines += [f"| {name} | {cell(found[name]['reason'])} |" for name in names]
        else:
            lines.append(", ".join(names))
    return "\n".join(lines) + "\n"


def cell(reason: str) -> str:
    """Return a reason as a cell of a Markdown table."""
    return shorten(reason, LONGEST).replace("|", "\\|").replace("<", "&lt;")
