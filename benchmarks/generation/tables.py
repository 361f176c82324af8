# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The results as a table, for the terminal and for the pages; it needs neither torch nor vLLM."""

from __future__ import annotations

from typing import Any

from benchmarks.table import markdown


def table(document: dict[str, Any]) -> str:
    """Return a table of the shares that are right, the differences, and where long answers part."""
    results = document["results"]
    sixteen_bit = results[0]["policy"]
    baseline = next(r["policy"] for r in results if "passes" in r)
    header = ["policy", "decode", "arithmetic right", "against 16 bit", "instructions followed"]
    header += ["against 16 bit", "first other token than 16 bit", f"than `{baseline}`"]
    rows = []
    for result in results:
        name, against = result["policy"], result["against"]
        reference, first = against.get(sixteen_bit), against.get(baseline)
        row = [f"`{name}`" if "passes" in result else name.replace(sixteen_bit, "16 bit")]
        row += [", ".join(f"`{plan}`" for plan in result.get("passes", {}).get("decode", {})) or "–"]
        for kind in ("arithmetic", "instructions"):
            row += [share(result["kinds"][kind]), difference(reference and reference[kind])]
        rows.append([*row, *(parting(other and other["long"]) for other in (reference, first))])
    return markdown(header, rows)


def share(found: dict[str, Any]) -> str:
    low, high = found["interval"]
    return f"{found['right'] / found['of']:.0%} ({low:.0%} – {high:.0%})"


def difference(found: dict[str, Any] | None) -> str:
    """Return the difference in points with its interval, and how many tasks each alone gets right."""
    if not found:
        return "–"
    points = [f"{100 * found[key]:+.0f}" for key in ("difference", "low", "high")]
    return f"{points[0]} ({points[1]} to {points[2]}; {found['only_first']} : {found['only_second']})"


def parting(found: dict[str, Any] | None) -> str:
    """Return the median token at which answers part, with its interval, and how many answers are equal."""
    if not found:
        return "–"
    ends = found["interval"]
    interval = f" ({number(ends[0])} – {number(ends[1])})" if ends else ""
    return f"{number(found['median'])}{interval}, {found['same']} of {found['of']} the same"


def number(token: float | None) -> str:
    return "none" if token is None else f"{token:g}"
