# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The outcomes of tests, each written as soon as it is known, so that a stopped run loses none.

As a plugin of pytest (``-p benchmarks.proof.outcomes``) it appends one line of JSON a test to the file that
the environment variable ``FLEXQUANT_OUTCOMES`` names, and leaves out the tests that have passed there before.
It first names there all tests that are to run, and runs those of FIRST first and those that failed last.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "FLEXQUANT_OUTCOMES"
PASSED, FAILED, SKIPPED, NOT_RUN = "passed", "failed", "skipped", "not run"
FIRST = ("FULL-by-size", "test_tune.py", "serves_in_int8")
"""Parts of the names of tests to run first: these have not passed on a GPU yet."""
LONGEST_REASON = 2000

Outcomes = dict[str, dict[str, Any]]
"""Test -> its ``outcome`` and, if it ran, ``seconds`` and, unless it passed, the ``reason``."""


def read_outcomes(file: Path) -> Outcomes:
    """Return the last outcome of every test; none if there is no file. A last line cut off is ignored."""
    found: Outcomes = {}
    lines = file.read_text(encoding="utf-8").split("\n") if file.is_file() else []
    for line in lines[:-1]:
        outcome = json.loads(line)
        found[outcome.pop("test")] = outcome
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    found = read_outcomes(Path(os.environ[VARIABLE]))
    done = [item for item in items if found.get(item.nodeid, {}).get("outcome") == PASSED]
    config.hook.pytest_deselected(items=done)
    items[:] = [item for item in items if item not in done]
    failed = {test for test, outcome in found.items() if outcome["outcome"] == FAILED}
    items.sort(key=lambda i: (i.nodeid in failed, not any(part in i.nodeid for part in FIRST)))
    if getattr(config, "workerinput", {"workerid": "gw0"})["workerid"] == "gw0":
        append(*({"test": i.nodeid, "outcome": NOT_RUN} for i in items if i.nodeid not in found))


def pytest_configure(config: pytest.Config) -> None:
    # With pytest-xdist the workers see their reports too, and the main process sees all.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Writer())


class Writer:
    """Appends what is known of a test."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != PASSED:
            write(report)


def write(report: pytest.TestReport) -> None:
    line: dict[str, object] = {
        "test": report.nodeid,
        "outcome": report.outcome,
        "seconds": round(report.duration, 1),
    }
    if report.outcome == SKIPPED and isinstance(report.longrepr, tuple):
        line["reason"] = report.longrepr[-1].removeprefix("Skipped: ")
    elif report.outcome != PASSED:
        line["reason"] = report.longreprtext[-LONGEST_REASON:]
    append(line)


def append(*lines: Mapping[str, object]) -> None:
    with open(os.environ[VARIABLE], "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
