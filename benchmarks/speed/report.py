# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The report of a results folder, ``report.md``, made from the cells alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.speed.results import Cell, read_cells, read_header
from benchmarks.speed.serving import short_of_memory
from benchmarks.speed.tables import (
    by_workload,
    kernel_results,
    kernel_table,
    latency_table,
    memory_table,
    ratio_table,
    start_results,
)
from flexquant.errors import FlexQuantError

REPORT = "report.md"
READING = (
    "Requests are written REQUESTSxINPUT+OUTPUT in tokens: a batch that arrives at once, with /1 one request "
    "after another, with @RATE a stream of that many requests a second, with ~SPREAD of random lengths. "
    "Numbers are medians over rounds, with the smallest and the largest."
)
COMPARING = (
    "Ratios of paired rounds with their 95 % interval; below 1 is faster, for tokens/s above. Where a second "
    "server of the static checkpoint was measured, the interval is wider by their ratio. Equal within x %: "
    "the interval holds 1 and reaches x % from it."
)


def write_report(folder: Path) -> Path:
    """Write ``report.md`` into ``folder``; return its path.

    Raises FlexQuantError for a folder without results.
    """
    header = read_header(folder)
    cells = read_cells(folder)
    if not cells:
        raise FlexQuantError(f"{folder} holds no results yet; start the run again")
    newest = cells[-1]["machine"]
    here = [cell for cell in cells if cell["machine"] == newest]
    sections = [f"# Speed of {header['model']}", _origin(here, len(cells) - len(here)), *_sections(here)]
    (folder / REPORT).write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    return folder / REPORT


def _sections(cells: Sequence[Cell]) -> Iterable[str]:
    if serving := by_workload(cells, "serving"):
        results = [
            r for subjects in serving.values() for rounds in subjects.values() for r in rounds.values()
        ]
        yield " ".join(["## Latency and throughput\n\n" + READING, short_of_memory(results)]).rstrip()
        yield latency_table(serving)
        yield f"## FlexQuant against static\n\n{COMPARING}"
        yield ratio_table(serving)
    if memory := start_results(cells):
        yield (
            "## Memory and start\n\nWeights as FlexQuant reports them; of a static checkpoint the size on "
            "disk. All servers run side by side, so the KV cache is one server's share. The start includes "
            "loading, compiling and capturing CUDA graphs."
        )
        yield memory_table(memory)
    if kernels := kernel_results(cells):
        yield (
            "## Kernels\n\nvLLM's own linear layers, quantising activations included: median and quartiles; "
            "bytes of weights, inputs and outputs a second; operations a second."
        )
        for (layer, outputs, inputs), by_tokens in kernels.items():
            names = {
                s: f["kernel"] for found in by_tokens.values() for s, f in found.items() if "kernel" in f
            }
            listed = ", ".join(f"{scheme}: {name}" for scheme, name in names.items())
            yield f"### {layer}, {inputs} to {outputs}\n\n{listed}."
            yield kernel_table(by_tokens)
    if problems := list(_problems(cells)):
        yield "## Not measured"
        yield "\n".join(problems)


def _problems(cells: Iterable[Cell]) -> Iterable[str]:
    """Yield a line for everything that failed or has no kernel, once."""
    seen: dict[str, None] = {}
    for cell in cells:
        p = cell["parameters"]
        what = p.get("subject") or f"{p['layer']}, {p['tokens']} tokens"
        if "failure" in cell:
            text = cell["failure"].replace("\n", "\n    ")
            seen[f"- {cell['part']}, {what}: {text}"] = None
        elif cell["part"] == "kernels":
            for scheme, found in cell["result"].items():
                if "unavailable" in found:
                    seen[f"- kernels, {p['layer']}, {scheme}: {found['unavailable']}"] = None
    return seen


def _origin(cells: Sequence[Cell], others: int) -> str:
    """Return where the numbers come from; what several cells share is named once."""
    machine = cells[-1]["machine"]
    commits = list(dict.fromkeys(cell["commit"] for cell in cells))
    versions = list(
        dict.fromkeys(" ".join(f"{k} {v}" for k, v in cell["versions"].items()) for cell in cells)
    )
    commands = list(dict.fromkeys(" ".join(cell["argv"]) for cell in cells))
    gpu = f"{machine['gpu']}, " if machine["gpu"] else ""
    dates = f"{cells[0]['finished'][:10]} to {cells[-1]['finished'][:10]}"
    lines = [
        f"- machine: {gpu}{machine['cpu']}, {machine['cores']} cores",
        *(f"- versions: {text}" for text in versions),
        f"- commit: {', '.join(commits)}",
        *(f"- command: `{text}`" for text in commands),
        f"- {len(cells)} cells, {dates}, {sum(cell['seconds'] for cell in cells):.0f} s of measuring",
    ]
    if others:
        lines.append(f"- {others} cells of other machines in this folder are left out")
    return "\n".join(lines)
