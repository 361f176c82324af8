# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Gives tests side by side their own cores, and counts engines and programs; a container of a kind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

# Engines and servers of tests share cores: a thread that spins while it waits takes a core from others.
# OpenMP reads this where torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# vLLM reads this where it is imported, and commands that tests run in this process ask for errors alone.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

STARTS = pytest.StashKey[Counter[str]]()
"""How many were started, keyed by kind: engines in this process, and programs."""


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


@pytest.fixture(scope="session")
def container() -> list[str]:
    """Return the start of a command whose rest runs as in a container: with its own process ids and mounts.

    No privileges are needed to make it, but a container's default seccomp profile refuses it inside.
    """
    command = ["unshare", "--map-root-user", "--pid", "--mount", "--fork", "--kill-child"]
    try:
        probe = [*command, "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
        done = subprocess.run(probe, capture_output=True, text=True, timeout=60)
        problem = done.returncode and (done.stderr.strip() or f"it ends with {done.returncode}")
    except FileNotFoundError:
        problem = "there is no such program"
    if problem:
        pytest.skip(f"this machine does not let its users make namespaces with unshare: {problem}")
    return command
