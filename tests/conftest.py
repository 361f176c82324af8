# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Gives tests side by side their own cores, and counts the engines and programs that a session started."""

import os
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

# Engines and servers of tests share cores: a thread that spins while it waits takes a core from others.
# OpenMP reads this where torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# vLLM reads this where it is imported, and commands that tests run in this process ask for errors alone.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

STARTS = pytest.StashKey[Counter[str]]()
"""How many were started, keyed by kind: engines in this process, and programs."""


def rest_full(values: Iterable[Any], *every_day: Any) -> list[Any]:
    """Return values as parameters of a test; those that are not of every day are for test-full alone."""
    return [value if value in every_day else pytest.param(value, marks=pytest.mark.full) for value in values]


def pytest_configure(config: pytest.Config) -> None:
    starts = config.stash[STARTS] = Counter()
    worker = getattr(config, "workerinput", None)
    if worker is None and config.getoption("numprocesses", None):
        return  # pytest-xdist's workers run the tests
    if worker is not None:
        cores = sorted(os.sched_getaffinity(0))
        number = int(worker["workerid"].removeprefix("gw"))
        os.sched_setaffinity(0, cores[number :: worker["workercount"]] or cores)

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            starts["programs"] += 1

    sys.addaudithook(count)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["starts"] = dict(session.config.stash[STARTS])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[STARTS].update(getattr(node, "workeroutput", {}).get("starts", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    starts = config.stash[STARTS]
    terminalreporter.write_line(
        f"started: {starts['engines']} engines in test processes, {starts['programs']} programs, "
        "some of which start engines and servers of their own"
    )
