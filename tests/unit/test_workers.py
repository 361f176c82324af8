# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Workers that hang are ended with all that they started, in whatever state they are; without an engine."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from flexquant.evaluation import workers
from flexquant.evaluation.workers import Worker
from flexquant.policy.rules import load_policy
from tests.programs import is_running


def hang_without_a_group(connection: Connection, *arguments: Any) -> None:
    connection.send((True, None))
    time.sleep(600)


def hang_with_a_child(connection: Connection, *arguments: Any) -> None:
    os.setpgrp()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    connection.send((True, child.pid))
    time.sleep(600)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Worker]:
    # Not vLLM's fork server, which would stay for the tests that follow.
    monkeypatch.setattr(workers, "_processes", multiprocessing.get_context("spawn"))
    monkeypatch.setattr(workers, "END_TIMEOUT", 0.1)

    def start(body: Callable[..., None]) -> Worker:
        monkeypatch.setattr(workers, "_serve", body)
        return Worker("w8a8", tmp_path, load_policy("phase"), {}, tmp_path)

    return start


@pytest.mark.parametrize("ends_by_itself", [False, True])
def test_a_worker_without_a_process_group_is_ended_also_as_it_ends(start, monkeypatch, ends_by_itself):
    worker = start(hang_without_a_group)
    worker.wait_until_ready()
    if ends_by_itself:
        worker._process.kill()
        worker._process.join()
        monkeypatch.setattr(worker._process, "is_alive", lambda: True)
    worker.close()
    worker.join()
    monkeypatch.undo()
    assert not worker._process.is_alive()


def test_a_worker_is_ended_with_what_it_started(start):
    worker = start(hang_with_a_child)
    child = worker._receive(60)
    worker.close()
    worker.join()
    assert not worker._process.is_alive()
    while is_running(child):  # the kernel is ending it
        time.sleep(0.01)
