# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Programs, servers and workers that are started: bounded in time, and ended with all that they began."""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from examples.vllm_server import ProcessGroup, ServerError, VLLMServer, end_of_log
from flexquant.evaluation import workers
from flexquant.evaluation.workers import Worker
from flexquant.policy.rules import load_policy
from tests import programs
from tests.programs import is_running

SLEEP = "import time; time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); {SLEEP}"
LEAVES_A_CHILD = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
"""

signalled: list[tuple[int, bool]] = []
"""Every signal to a group since this file was imported: the group, and whether its leader still existed."""


def watch(event: str, arguments: tuple) -> None:
    if event == "os.killpg":
        signalled.append((arguments[0], Path(f"/proc/{arguments[0]}").exists()))


sys.addaudithook(watch)


@pytest.fixture
def start(tmp_path) -> Iterator:
    groups: list[ProcessGroup] = []

    def start(program: str) -> ProcessGroup:
        groups.append(ProcessGroup([sys.executable, "-c", program], tmp_path / "log", os.environ))
        return groups[-1]

    yield start
    for group in groups:
        group.stop()


def wait_for_line(log: Path) -> str:
    while "\n" not in (text := log.read_text()):
        time.sleep(0.01)
    return text


def wait_for_end(group: ProcessGroup) -> int:
    while (code := group.exit_code()) is None:
        time.sleep(0.01)
    return code


@pytest.mark.parametrize("program, ended", [(SLEEP, False), ("pass", True)], ids=["running", "ended"])
def test_no_signal_goes_to_a_group_whose_number_is_free_again(start, program, ended):
    """Once a leader is reaped, its number may belong to somebody else's group."""
    group = start(program)
    if ended:
        wait_for_end(group)
    del signalled[:]
    group.stop()
    assert len(signalled) == 2 and all(exists for _, exists in signalled)
    group.stop()
    assert len(signalled) == 2 and not Path(f"/proc/{signalled[0][0]}").exists()


def test_threads_that_stop_one_group(start):
    group = start(SLEEP)
    del signalled[:]
    threads = [Thread(target=group.stop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [exists for _, exists in signalled] == [True, True]


def test_what_an_ended_program_left_behind_is_ended(start, tmp_path):
    group = start(LEAVES_A_CHILD)
    assert wait_for_end(group) == 0
    child = int(wait_for_line(tmp_path / "log"))
    assert is_running(child)
    group.stop()
    while is_running(child):  # the kernel is ending it
        time.sleep(0.01)


@pytest.mark.parametrize(
    "program, code", [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9), (STUBBORN, -9)]
)
def test_exit_codes_also_of_a_program_that_ignores_sigterm(start, tmp_path, program, code):
    group = start(program)
    if program == STUBBORN:
        wait_for_line(tmp_path / "log")
        group.stop(patience=0.1)
    else:
        assert wait_for_end(group) == code
        group.stop()
    assert group.exit_code() == code


def test_end_of_log(tmp_path):
    log = tmp_path / "log"
    assert end_of_log(log, 2) == ""
    log.write_bytes(b"one\ntwo \xff\nthree\n")
    assert end_of_log(log, 2) == "two \ufffd\nthree"


def test_a_server_that_is_stopped_answers_with_its_end(tmp_path):
    server = VLLMServer(tmp_path / "no-such-model", [], tmp_path / "log")
    server.stop()
    with pytest.raises(ServerError, match="^vllm serve ended with code -15; its log ends:\n"):
        server.wait_until_healthy()


def test_another_exit_code_fails_with_what_was_printed():
    command = [sys.executable, "-c", "import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)"]
    for status in (3, None):
        done = programs.run(command, timeout=60, status=status)
        assert (done.returncode, done.stdout, done.stderr) == (3, "one\n", "two\n")
    with pytest.raises(pytest.fail.Exception, match="(?s)ended with 3 instead of 0.*one.*two"):
        programs.run(command, timeout=60)


def test_a_program_that_takes_too_long_may_clean_up_and_fails(tmp_path):
    code = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where pytest runs in the background
print("started", flush=True)
try:
    time.sleep(600)
finally:
    print("cleaned up")
"""
    with pytest.raises(pytest.fail.Exception, match="(?s)did not end within 5 s.*started\ncleaned up"):
        programs.run([sys.executable, "-c", code], timeout=5)


def hang_without_a_group(connection: Connection, *arguments: Any) -> None:
    connection.send((True, None))
    time.sleep(600)


def hang_with_a_child(connection: Connection, *arguments: Any) -> None:
    os.setpgrp()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    connection.send((True, child.pid))
    time.sleep(600)


@pytest.fixture
def start_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Worker]:
    # Not vLLM's fork server, which would stay for the tests that follow.
    monkeypatch.setattr(workers, "_processes", multiprocessing.get_context("spawn"))
    monkeypatch.setattr(workers, "END_TIMEOUT", 0.1)

    def start_worker(body: Callable[..., None]) -> Worker:
        monkeypatch.setattr(workers, "_serve", body)
        return Worker("w8a8", tmp_path, load_policy("phase"), {}, tmp_path)

    return start_worker


@pytest.mark.parametrize("ends_by_itself", [False, True])
def test_a_worker_without_a_process_group_is_ended_also_as_it_ends(start_worker, monkeypatch, ends_by_itself):
    worker = start_worker(hang_without_a_group)
    worker.wait_until_ready()
    if ends_by_itself:
        worker._process.kill()
        worker._process.join()
        monkeypatch.setattr(worker._process, "is_alive", lambda: True)
    worker.close()
    worker.join()
    monkeypatch.undo()
    assert not worker._process.is_alive()


def test_a_worker_is_ended_with_what_it_started(start_worker):
    worker = start_worker(hang_with_a_child)
    child = worker._receive(60)
    worker.close()
    worker.join()
    assert not worker._process.is_alive()
    while is_running(child):  # the kernel is ending it
        time.sleep(0.01)
