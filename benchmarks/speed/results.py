# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The folder of results: one JSON file a cell, written when the cell is finished, never measured twice.

A cell is found again by what it measured, the versions, the machine and the git commit; so the same command
started again goes on where it stopped. A failed cell is kept for the report and tried again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexquant.errors import FlexQuantError
from flexquant.evaluation.machine import describe_command, describe_machine, describe_versions

SCHEMA = "flexquant.speed/v1"
ROOT = Path(__file__).parents[2]
MEASURED_CODE = ("benchmarks/speed", "flexquant", "merge", "policies")
Cell = dict[str, Any]


class Results:
    """Cells of one model in one folder."""

    def __init__(self, folder: Path, model: str, commit: str | None = None) -> None:
        """Open or begin a folder; raise FlexQuantError if it holds anything else."""
        self.folder = folder
        self.environment = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "commit": commit or git_commit(),
        }
        about = folder / "suite.json"
        if about.is_file():
            found = read_about(folder)["model"]
            if found != model:
                raise FlexQuantError(
                    f"{folder} holds results of the model '{found}', not '{model}'; choose another --output"
                )
        elif folder.exists() and any(folder.iterdir()):
            raise FlexQuantError(f"{folder} holds something else than speed results; choose another --output")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(about, {"schema": SCHEMA, "model": model})

    def find(self, part: str, parameters: Mapping[str, Any]) -> Cell | None:
        """Return the finished cell, or None if it is still to be measured (or failed)."""
        path = self._path(part, parameters)
        cell = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        return cell if cell and "failure" not in cell else None

    def save(self, part: str, parameters: Mapping[str, Any], seconds: float, **outcome: Any) -> Cell:
        """Write a cell and return it; ``outcome`` is its ``result`` or its ``failure`` (a text)."""
        cell = {
            "schema": SCHEMA,
            "part": part,
            "parameters": dict(parameters),
            **outcome,
            **self.environment,
            "argv": ["python", "-m", "benchmarks", *describe_command()[1:]],
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seconds": round(seconds, 3),
        }
        path = self._path(part, parameters)
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, cell)
        return cell

    def _path(self, part: str, parameters: Mapping[str, Any]) -> Path:
        key = json.dumps([part, parameters, self.environment], sort_keys=True)
        return self.folder / part / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def read_about(folder: Path) -> dict[str, Any]:
    """Return what a results folder says of itself; raise FlexQuantError if it is none."""
    try:
        about = json.loads((folder / "suite.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise FlexQuantError(
            f"{folder} is not a folder of speed results (no readable suite.json); give the --output of a run"
        ) from e
    if about.get("schema") != SCHEMA:
        raise FlexQuantError(
            f"{folder} has schema {about.get('schema')!r}; this report reads '{SCHEMA}' only"
        )
    return about


def read_cells(folder: Path) -> list[Cell]:
    """Return the newest cell for every (part, parameters, machine), oldest first, failures included."""
    cells = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*/*.json")]
    newest: dict[str, Cell] = {}
    for cell in sorted(cells, key=lambda c: c["finished"]):
        newest[json.dumps([cell["part"], cell["parameters"], cell["machine"]], sort_keys=True)] = cell
    return sorted(newest.values(), key=lambda c: c["finished"])


def write_atomically(path: Path, document: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def git_commit() -> str:
    """Return the commit, with ``+changes`` if code that is measured differs from it; else ``unknown``."""

    def git(*command: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", *MEASURED_CODE)
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def end_of_log(text: str, lines: int = 30) -> str:
    """Return the end of a log without this machine's folders and the servers' line prefixes."""
    for folder, short in ((str(ROOT), "."), (str(Path(sys.prefix)), "."), (str(Path.home()), "~")):
        text = text.replace(folder, short)
    text = re.sub(r"^\(\w+ pid=\d+\) ", "", text, flags=re.MULTILINE)
    return "\n".join(line[:300] for line in text.splitlines()[-lines:])
