# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What the system refuses about a user's path is one sentence; a fault of ours stays a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pytest
from torch.distributed import FileStore

from flexquant import cli
from flexquant.cli import explain_os_error
from flexquant.merge import merge_checkpoints
from tests.checkpoints import make_checkpoint

TOO_LONG = "n" * 300


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "w8a8")


@pytest.fixture(scope="module")
def merged(source: Path) -> Path:
    merge_checkpoints({"w8a8": source}, source.with_name("merged"))
    return source.with_name("merged")


def complaint(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
    """Run a command that fails with exit code 1; return its one line on stderr."""
    assert cli.main([str(part) for part in argv]) == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"flexquant {argv[0]}: error: ")
    return line


def test_a_name_that_the_system_refuses(merged, source, tmp_path, capsys):
    output = tmp_path / TOO_LONG
    for argv in (
        ["merge", f"w8a8={source}", "--output", output],
        ["split", merged, "--variant", "w8a8", "--output", output],
        ["inspect", output],
    ):
        line = complaint(capsys, *argv)
        assert TOO_LONG in line and "File name too long" in line and "; choose a" in line


@pytest.mark.parametrize("folder", ["file/below", "/proc/flexquant/below"])
def test_a_folder_that_cannot_be_made(merged, source, tmp_path, capsys, folder):
    (tmp_path / "file").write_text("mine")
    output = tmp_path / folder
    for argv in (
        ["merge", f"w8a8={source}", "--output", output],
        ["split", merged, "--variant", "w8a8", "--output", output],
    ):
        assert str(output) in complaint(capsys, *argv)
    assert (tmp_path / "file").read_text() == "mine"


def run(*argv: str | Path, stdout: TextIO) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flexquant", *map(str, argv)]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True)


def test_a_full_disk_behind_the_standard_output(merged):
    with open("/dev/full", "w") as full:
        result = run("inspect", merged, "--json", stdout=full)
    assert result.returncode == 1
    assert result.stderr.startswith("flexquant inspect: error: the disk is full")
    assert len(result.stderr.splitlines()) == 1


def test_a_full_disk_of_which_a_library_tells(tmp_path):
    """vLLM's processes meet through a temporary file, which the library cannot write."""
    (tmp_path / "store").symlink_to("/dev/full")
    with pytest.raises(RuntimeError) as told:
        FileStore(str(tmp_path / "store"), 1).set("key", "value")
    sentence = explain_os_error(told.value)
    assert sentence is not None and sentence.startswith("the disk is full (No space left on device")
    assert explain_os_error(RuntimeError("something else")) is None


def test_a_reader_that_goes_away_is_no_traceback(merged):
    command = [sys.executable, "-m", "flexquant", "inspect", str(merged)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 1


def test_a_file_missing_from_the_package_itself_is_not_the_users_to_mend():
    ours = Path(cli.__file__).with_name("gone.yaml")
    with pytest.raises(FileNotFoundError) as found:
        ours.read_text()
    assert explain_os_error(found.value) is None
    assert explain_os_error(ConnectionResetError(104, "Connection reset by peer")) is None
    assert explain_os_error(OSError("raised by hand")) is None
