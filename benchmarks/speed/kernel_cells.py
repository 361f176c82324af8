# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The kernel measurements of a model: its layers by numbers of tokens, in a process of their own."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.speed.models import Model
from benchmarks.speed.results import Results
from benchmarks.speed.worker import Worker, WorkerError

KERNELS = "kernels"


def measure_kernels(
    model: Model,
    results: Results,
    *,
    layers: Sequence[str],
    tokens: Sequence[int],
    schemes: Sequence[str],
    seconds: float,
    logs: Path,
    deadline: float,
    timeout: float,
) -> int:
    """Measure what is missing, ``seconds`` a cell; return how many cells are left because time ran out."""
    shapes = model.shape.fused_projections()
    cells: list[dict[str, Any]] = [
        {
            "model": model.name,
            "layer": layer,
            "outputs": shapes[layer][0],
            "inputs": shapes[layer][1],
            "tokens": count,
            "schemes": list(schemes),
        }
        for layer in layers
        for count in tokens
    ]
    missing = [cell for cell in cells if results.find(KERNELS, cell) is None]
    print(f"kernels: {len(cells) - len(missing)} of {len(cells)} cells are there already", flush=True)
    # As many threads as vLLM serves with on a CPU: it leaves one core to its front end.
    threads = str(max(1, (os.cpu_count() or 1) - 1))
    worker = Worker("benchmarks.speed.kernels", logs / "kernels.log", {"OMP_NUM_THREADS": threads})
    try:
        for done, cell in enumerate(missing):
            if time.monotonic() > deadline:
                return len(missing) - done
            print(
                f"[{done + 1}/{len(missing)}] {cell['layer']}, {cell['tokens']} tokens: ", end="", flush=True
            )
            started = time.monotonic()
            try:
                result = worker.call({**cell, "seconds": seconds}, timeout)
            except WorkerError as e:
                results.save(KERNELS, cell, time.monotonic() - started, failure=str(e))
                print(f"failed: {e}", flush=True)
                continue
            results.save(KERNELS, cell, time.monotonic() - started, result=result)
            print(", ".join(f"{scheme} {_text(found)}" for scheme, found in result.items()), flush=True)
    finally:
        worker.close()
    return 0


def _text(found: dict[str, Any]) -> str:
    return "no kernel" if "unavailable" in found else f"{found['microseconds']:.1f} us"
