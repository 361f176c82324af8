# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""README tables of one copy: INT8 computed from INT4 weights, beside each static precision and two copies."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.serving_tables import RESULTS
from benchmarks.speed.comparing import paired_ratios
from benchmarks.speed.live_policies import table
from benchmarks.speed.results import read_cells
from benchmarks.speed.tables import METRICS, by_workload
from benchmarks.table import markdown
from flexquant.measuring.comparison import compare

ONE_COPY = "flexquant:one-copy"
OTHERS = {
    "w4a16": "W4A16",
    "w4a16-chosen": "W4A16, best kernel",
    "w8a8": "W8A8",
    "flexquant:benchmarks/results/tuning/smollm2-135m-avx512.yaml": "two copies",
}
"""Subjects of the run of servers -> what they are called."""
LIVE = {
    "SmolLM2-135M": "one-copy-live-smollm2.json",
    "The 0.5 B shape": "one-copy-live-0.5b.json",
    "The 1.5 B shape": "one-copy-live-1.5b.json",
}
"""Models -> results of one server that took the policies in turns."""


def one_copy_served() -> str:
    """Return one copy over every other way to serve, by TTFT and by TPOT, for each kind of requests."""
    measured = by_workload(read_cells(RESULTS / "one-copy-smollm2-135m"), "serving")
    tables = []
    for metric in ("TTFT ms", "TPOT ms"):
        rows = [
            [
                f"`{workload.name}`",
                *(
                    str(compare(paired_ratios(subjects[ONE_COPY], subjects[other], METRICS[metric][0])))
                    for other in OTHERS
                ),
            ]
            for workload, subjects in measured.items()
        ]
        name = metric.removesuffix(" ms")
        tables.append(markdown([f"{name} of one copy over", *OTHERS.values()], rows))
    return "\n\n".join(tables)


def one_copy_live() -> str:
    """Return policies on one live server of each model, in turns."""
    return "\n\n".join(f"{name}:\n\n{table(_read(file)['cells'])}" for name, file in LIVE.items())


def one_copy_memory() -> str:
    """Return the memory of one process under each policy, and over W4A16's."""
    rows = []
    for model, found in _read("copies-in-memory.json")["process_mib"].items():
        over = (f"{mib:,.0f} ({mib / found['w4a16']:.2f})" for mib in found.values())
        rows.append([model, *over])
        header = ["MiB of the process (over `w4a16`)", *(f"`{policy}`" for policy in found)]
    return markdown(header, rows)


def _read(file: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    return found


BLOCKS = (one_copy_served, one_copy_live, one_copy_memory)
"""Functions, each of which returns the block of its name."""
