# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The steps that a proof has taken, each written as it ends, and commands that end in their time."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.speed.results import ROOT

STEPS, LOG = "steps.jsonl", "log.txt"
DONE, OUT_OF_TIME, FAILED = "done", "out of time", "failed"
SECONDS_TO_END = 30
"""Most seconds, of a command's own time, in which it has to stop the servers that it has started."""

Steps = dict[str, dict[str, Any]]
"""Step -> its ``state``, ``note`` and ``seconds``, and the commit, machine and versions that it ran with."""


class Outcome(NamedTuple):
    """How a step ended."""

    state: str
    """DONE, OUT_OF_TIME or FAILED."""
    note: str = ""
    """What a reader of its results has to know, or why it failed."""


def read_steps(folder: Path) -> Steps:
    """Return the last outcome of every step; a last line cut off is ignored."""
    file = folder / STEPS
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.is_file() else []
    return {found.pop("step"): found for found in map(json.loads, lines)}


def append_step(folder: Path, name: str, outcome: Outcome, seconds: float, where: Mapping[str, Any]) -> None:
    line = {"step": name, **outcome._asdict(), "seconds": round(seconds, 1), **where}
    with open(folder / STEPS, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def run_bounded(
    command: Sequence[object], seconds: float, environment: Mapping[str, str], log: Path
) -> Outcome:
    """Run a command for at most ``seconds``; it is asked to end early enough to end what it has started.

    What it prints is appended to ``log``.
    """
    to_end = min(SECONDS_TO_END, seconds / 5)
    with open(log, "ab") as file:
        process = subprocess.Popen(
            [str(part) for part in command], cwd=ROOT, env=environment, stdout=file, stderr=file
        )
        try:
            status = process.wait(seconds - to_end)
        except subprocess.TimeoutExpired:
            return Outcome(OUT_OF_TIME)
        finally:
            process.terminate()
            try:
                process.wait(to_end)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if status == 0:
        return Outcome(DONE)
    said = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
    return Outcome(FAILED, f"ended with {status}, {log.name} ends: {said[:300]}")
