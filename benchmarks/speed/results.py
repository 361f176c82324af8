# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The results of a run: one line of JSON a cell, appended when the cell is finished, never measured twice.

The first line of ``cells.jsonl`` is the header: schema, model, and the machine, versions, commit and command
that the run began with. Each further line is a cell; what a cell does not say itself, the header says.

A cell is found again by what it measured, the versions, the machine and the git commit; so the same command
started again goes on where it stopped. A failed cell is kept for the report and tried again.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexquant.errors import FlexQuantError
from flexquant.evaluation.engine import describe_command, describe_machine, describe_versions

SCHEMA = "flexquant.speed/v2"
CELLS = "cells.jsonl"
ROOT = Path(__file__).parents[2]
MEASURED_CODE = ("benchmarks/speed", "flexquant", "merge", "policies")
NAMED_BY_CELLS = {"part", "parameters", "finished", "seconds"}
Header = dict[str, Any]
Cell = dict[str, Any]


class Results:
    """The cells of one model in one folder."""

    def __init__(self, folder: Path, model: str, commit: str | None = None) -> None:
        """Open or begin a folder; raise FlexQuantError if it holds anything else."""
        self.folder = folder
        self.environment = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "commit": commit or git_commit(),
        }
        self._file = folder / CELLS
        cells: list[Cell] = []
        if self._file.is_file():
            self._header, cells = read_lines(folder)
            if self._header["model"] != model:
                raise FlexQuantError(
                    f"{folder} holds results of the model '{self._header['model']}', not '{model}'; choose "
                    "another --output"
                )
            _end_last_line(self._file)
        elif folder.exists() and any(folder.iterdir()):
            raise FlexQuantError(f"{folder} holds something else than speed results; choose another --output")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            self._header = {"schema": SCHEMA, "model": model, **self.environment, "argv": _command()}
            self._append(self._header)
        self._found = {_key(cell["part"], cell["parameters"], cell): cell for cell in cells}

    def find(self, part: str, parameters: Mapping[str, Any]) -> Cell | None:
        """Return the finished cell, or None if it is still to be measured (or failed)."""
        cell = self._found.get(_key(part, parameters, self.environment))
        return cell if cell and "failure" not in cell else None

    def save(self, part: str, parameters: Mapping[str, Any], seconds: float, **outcome: Any) -> Cell:
        """Append a cell and return it; ``outcome`` is its ``result`` or its ``failure`` (a text)."""
        cell = {
            "part": part,
            "parameters": dict(parameters),
            **outcome,
            **self.environment,
            "argv": _command(),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seconds": round(seconds, 3),
        }
        self._append({name: value for name, value in cell.items() if self._header.get(name) != value})
        whole = {**self._header, **cell}
        self._found[_key(part, parameters, self.environment)] = whole
        return whole

    def _append(self, document: Mapping[str, Any]) -> None:
        with open(self._file, "ab") as file:
            file.write(json.dumps(document).encode() + b"\n")


def read_header(folder: Path) -> Header:
    """Return what a run says of itself; raise FlexQuantError if the folder holds none."""
    return read_lines(folder)[0]


def read_cells(folder: Path) -> list[Cell]:
    """Return the newest cell for every (part, parameters, machine), oldest first, failures included."""
    newest: dict[str, Cell] = {}
    for cell in sorted(read_lines(folder)[1], key=lambda c: c["finished"]):
        newest[json.dumps([cell["part"], cell["parameters"], cell["machine"]], sort_keys=True)] = cell
    return sorted(newest.values(), key=lambda c: c["finished"])


def read_lines(folder: Path) -> tuple[Header, list[Cell]]:
    """Return the header and every cell, completed from it, in the order of the file.

    A last line that was not written to its end is left out, with a message. Raises FlexQuantError for a
    folder without results, for another schema, and for any other line that is no cell.
    """
    file = folder / CELLS
    try:
        lines = file.read_bytes().split(b"\n")
        header = json.loads(lines[0])
        schema = header.get("schema")
    except (OSError, ValueError, AttributeError) as e:
        raise FlexQuantError(
            f"{folder} is not a folder of speed results (no readable {CELLS}); give the --output of a run"
        ) from e
    if schema != SCHEMA:
        raise FlexQuantError(f"{file} has schema {schema!r}; only '{SCHEMA}' is read")
    cells = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            if line:
                cells.append(_complete(json.loads(line), header))
        except (ValueError, AttributeError) as e:
            if number < len(lines):
                raise FlexQuantError(f"{file}, line {number} is not a cell; correct or delete it") from e
            print(f"{file}: its last line was not written to the end; its cell is left out", flush=True)
    return header, cells


def _complete(cell: Cell, header: Header) -> Cell:
    if missing := NAMED_BY_CELLS - cell.keys():
        raise ValueError(f"no {', '.join(sorted(missing))}")
    return {**header, **cell}


def _end_last_line(file: Path) -> None:
    """Make the file end with a line break: complete the last line, or drop it if it is no JSON."""
    data = file.read_bytes()
    last = data[data.rfind(b"\n") + 1 :]
    if last:
        with open(file, "r+b") as out:
            try:
                json.loads(last)
                out.seek(len(data))
                out.write(b"\n")
            except ValueError:
                out.truncate(len(data) - len(last))


def _key(part: str, parameters: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    where = [environment[name] for name in ("machine", "versions", "commit")]
    return json.dumps([part, parameters, *where], sort_keys=True)


def _command() -> list[str]:
    return ["python", "-m", "benchmarks", *describe_command()[1:]]


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
