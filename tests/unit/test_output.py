# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""One writer an output, whatever its process id; killed anywhere it leaves the old output or none."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flexquant.checkpoint.output import prepare_output, staged_file, staged_folder
from flexquant.errors import FlexQuantError
from tests import programs

# Stays in the stage until a line comes in; the process id is told first.
WRITE_SLOWLY = """
import os, sys
from pathlib import Path
from flexquant.checkpoint.output import prepare_output, staged_folder

output = Path(sys.argv[1])
prepare_output(output, [], overwrite=True)
with staged_folder(output) as stage:
    (stage / "config.json").write_text("{}")
    print(os.getpid(), flush=True)
    sys.stdin.readline()
"""

# Kills itself before the n-th operation on the folder that Python reports to its audit hooks.
DIE_EARLY = """
import os, signal, sys
from pathlib import Path
from flexquant.checkpoint import output as output_module

folder, fatal, exchange = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "exchange"
if not exchange:
    output_module.ctypes.CDLL = lambda *args, **options: object()
operations = 0

def count(event, arguments):
    global operations
    if event.startswith(("ctypes.dl", "fcntl.")) or any(str(folder) in str(part) for part in arguments):
        operations += 1
        if operations == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count)
output_module.prepare_output(folder / "merged", [], overwrite=True)
with output_module.staged_folder(folder / "merged") as stage:
    for name in ("config.json", "weights"):
        (stage / name).write_text("new")
"""


def write(output: Path, text: str) -> None:
    prepare_output(output, [], overwrite=True)
    with staged_folder(output) as stage:
        for name in ("config.json", "weights"):
            (stage / name).write_text(text)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()} if folder.exists() else {}


def whole(text: str) -> dict[str, str]:
    return {"config.json": text, "weights": text}


def start_writer(container: list[str], output: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*container, sys.executable, "-c", WRITE_SLOWLY, str(output)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_second_container_with_the_same_pid_does_not_take_the_stage_of_the_first(container, tmp_path):
    first = start_writer(container, tmp_path / "merged")
    assert first.stdout is not None and first.stdout.readline() == "1\n"
    second = start_writer(container, tmp_path / "merged")
    _, complaint = second.communicate("\n", timeout=120)
    assert second.returncode == 1
    assert "merged is being written by another process" in complaint
    _, problems = first.communicate("\n", timeout=120)
    assert (first.returncode, problems) == (0, "")
    assert contents(tmp_path / "merged") == {"config.json": "{}"}
    assert list(tmp_path.iterdir()) == [tmp_path / "merged"]


def test_two_writers_in_one_process_do_not_share_a_stage(tmp_path):
    output = tmp_path / "merged"
    with staged_folder(output) as stage:
        (stage / "config.json").write_text("first")
        with pytest.raises(FlexQuantError, match="is being written by another process"):
            prepare_output(output, [], overwrite=True)
        with (
            pytest.raises(FlexQuantError, match="is being written by another process"),
            staged_folder(output),
        ):
            pass
    assert contents(output) == {"config.json": "first"}
    assert list(tmp_path.iterdir()) == [output]


def test_another_output_in_the_same_folder_is_not_locked(tmp_path):
    with staged_folder(tmp_path / "a"), staged_folder(tmp_path / "b"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("exchange", ["exchange", "two renames"])
@pytest.mark.parametrize("replaces", [True, False])
def test_killed_before_any_operation_it_leaves_the_old_output_or_none(tmp_path, exchange, replaces):
    died, fatal = True, 0
    while died:
        fatal += 1
        folder = tmp_path / str(fatal)
        folder.mkdir()
        old: dict[str, str] = {}
        if replaces:
            write(folder / "merged", "old")
            old = whole("old")
        command = [sys.executable, "-c", DIE_EARLY, str(folder), str(fatal), exchange]
        died = programs.run(command, timeout=120, status=None).returncode == -signal.SIGKILL
        prepare_output(folder / "merged", [], overwrite=True)  # the next run cleans up
        assert contents(folder / "merged") in ([old, whole("new")] if died else [whole("new")]), fatal
        write(folder / "merged", "newer")
        assert contents(folder / "merged") == whole("newer"), fatal
        assert list(folder.iterdir()) == [folder / "merged"], fatal
    assert fatal > 10


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FlexQuantError, match=r"cannot write .*merged: .*file"):
        write(tmp_path / "file" / "merged", "new")


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path):
    file = tmp_path / "file.json"
    file.write_text("old")
    with pytest.raises(ValueError), staged_file(file) as partial:
        partial.write_text("ne")
        raise ValueError
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
    with staged_file(file) as partial:
        partial.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new" and list(tmp_path.iterdir()) == [file]
