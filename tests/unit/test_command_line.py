# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The command line: values of options, lines of stages, and what the system refuses about a user's path."""

import argparse
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import termios
import time
from contextlib import suppress
from pathlib import Path

import pytest
from torch.distributed import FileStore

from flexquant import cli
from flexquant.cli import _arguments, explain_os_error
from flexquant.cli._arguments import parse_counts, parse_number, parse_seed, parse_share, parse_size
from flexquant.cli.quantize import Stages
from flexquant.merge import merge_checkpoints
from tests.checkpoints import make_checkpoint
from tests.programs import run


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("500mb", 500 * 10**6), ("2 GiB", 2 * 1024**3), ("1.5K", 1500)]
    + [("3TiB", 3 * 1024**4), ("1.5MiB", 3 * 1024**2 // 2), ("7", 7), ("7B", 7)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


MANY = "1" * 400
BAD = ["", "nan", "inf", "-inf", "1e999", "-1", "0x5", MANY, "1" * 5000, f"0.{'0' * 400}1", "five"]


@pytest.mark.parametrize("text", [*BAD, f"{MANY}GB", f"{MANY}.5TiB", f"{MANY}%", f"3,{MANY}", "nan%", "1GB1"])
@pytest.mark.parametrize(
    "parse",
    [_arguments.parse_count, parse_counts, parse_seed, parse_size, parse_number, _arguments.parse_percent],
)
def test_no_text_is_a_number_that_is_none(parse, text):
    """Whatever is taken is finite."""
    try:
        found = parse(text)
    except argparse.ArgumentTypeError as e:
        assert "is not a" in str(e) or "the list is empty" in str(e)
        return
    for number in found if isinstance(found, tuple) else [found]:
        assert isinstance(number, int | float) and math.isfinite(number) and abs(number) < 1e30


def test_shares_and_numbers():
    assert (parse_share("1"), parse_share("0.25"), parse_number("2.5"), parse_seed("0")) == (1, 0.25, 2.5, 0)
    for text in ("0", "1.1", "nan", "-0.5", "half"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not a share above 0"):
            parse_share(text)
    for text in ("nan", "-2.5"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not a number such as 0.1"):
            parse_number(text)


def two_stages() -> None:
    stages = Stages(2)
    with stages.stage("reading") as show:
        for done in range(1, 4):
            time.sleep(0.11)  # tqdm shows ten changes a second
            show(done, 3)
    with pytest.raises(ValueError), stages.stage("w8a8: {quantising}", unit=" layers") as show:
        time.sleep(0.11)
        show(12, 30)
        stages.note("3 linears were rounded to nearest")
        raise ValueError


LINES = r"""\[1/2\] reading \.\.\.
\[1/2\] reading \.\.\. [\d.]+ s
\[2/2\] w8a8: {quantising} \.\.\.
3 linears were rounded to nearest
"""


def test_a_file_gets_a_line_when_a_stage_begins_and_ends_and_for_each_note(tmp_path, monkeypatch):
    with (tmp_path / "log").open("w") as log:
        monkeypatch.setattr(sys, "stderr", log)
        two_stages()
        monkeypatch.undo()
    assert re.fullmatch(LINES, (tmp_path / "log").read_text())


def read_all(terminal: int) -> str:
    """Return what was written to a terminal whose other end is closed, and close this one."""
    written = b""
    with suppress(OSError):  # reading fails at the terminal's end
        while part := os.read(terminal, 10000):
            written += part
    os.close(terminal)
    return written.decode()


def test_a_terminal_also_sees_the_running_line_change(monkeypatch):
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (24, 100))
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        two_stages()
        monkeypatch.undo()
    written = read_all(master)
    assert "\r[1/2] reading ... 67%, 00:0" in written
    assert "\r[2/2] w8a8: {quantising} ... 12 of 30 layers, 00:0" in written
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in written.split("\r\n"))
    assert re.fullmatch(LINES, "".join(f"{line}\n" for line in lines if line.strip()))


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


@pytest.mark.parametrize("folder", [TOO_LONG, "file/below", "/proc/flexquant/below"])
def test_an_output_that_the_system_refuses(merged, source, tmp_path, capsys, folder):
    (tmp_path / "file").write_text("mine")
    output = tmp_path / folder
    commands = [["merge", f"w8a8={source}"], ["split", merged, "--variant", "w8a8"]]
    commands = [[*command, "--output", output] for command in commands]
    if folder == TOO_LONG:
        commands.append(["inspect", output])
    for argv in commands:
        line = complaint(capsys, *argv)
        assert str(output) in line
        if folder == TOO_LONG:
            assert "File name too long" in line and "; choose a" in line
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_behind_the_standard_output_is_told_and_a_reader_that_goes_away_is_no_traceback(merged):
    command = [sys.executable, "-m", "flexquant", "inspect", str(merged)]
    with open("/dev/full", "w") as full:
        result = subprocess.run([*command, "--json"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("flexquant inspect: error: the disk is full")
    assert len(result.stderr.splitlines()) == 1
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == 1


def test_a_full_disk_of_which_a_library_tells_and_what_is_not_the_users_to_mend(tmp_path):
    """vLLM's processes meet through a temporary file, which the library cannot write."""
    (tmp_path / "store").symlink_to("/dev/full")
    with pytest.raises(RuntimeError) as told:
        FileStore(str(tmp_path / "store"), 1).set("key", "value")
    sentence = explain_os_error(told.value)
    assert sentence is not None and sentence.startswith("the disk is full (No space left on device")
    with pytest.raises(FileNotFoundError) as gone:  # from the package itself
        Path(cli.__file__).with_name("gone.yaml").read_text()
    others = ConnectionResetError(104, "Connection reset by peer"), OSError("raised by hand")
    for error in (gone.value, RuntimeError("something else"), *others):
        assert explain_os_error(error) is None


def test_a_system_without_a_temporary_folder(monkeypatch):
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    with pytest.raises(FileNotFoundError) as told:
        tempfile._get_default_tempdir()
    assert "set TMPDIR to a folder that can be written" in str(explain_os_error(told.value))


@pytest.mark.parametrize(
    ("variables", "arguments", "status", "said"),
    [
        ({"PYTHONOPTIMIZE": "2"}, "--help", 0, "flexquant"),
        ({"PYTHONOPTIMIZE": "2"}, "inspect {merged}", 0, "2 layers"),
        pytest.param(
            *({"PYTHONOPTIMIZE": "2"}, "advise {source} --device l20", 1, "unset PYTHONOPTIMIZE"),
            marks=pytest.mark.full,
        ),
        ({"PYTHONIOENCODING": "ascii"}, "inspect {merged}", 0, r"\u6a21"),
        ({"LC_ALL": "C", "PYTHONUTF8": "0"}, "merge w8a8={source} --output {output}", 2, "set PYTHONUTF8=1"),
        ({"LC_ALL": "C"}, "inspect {merged}", 0, "\u6a21"),
    ],
)
def test_python_that_is_started_otherwise(merged, source, tmp_path, variables, arguments, status, said):
    (named := tmp_path / "\u6a21").symlink_to(merged)
    options = arguments.format(merged=named, source=source, output=tmp_path / "output").split()
    command, environment = [sys.executable, "-m", "flexquant", *options], os.environ | variables
    done = run(command, timeout=300, status=status, environment=environment)
    assert said in done.stdout + done.stderr and "Traceback" not in done.stderr


def test_a_source_whose_name_is_no_text(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = os.fsdecode(b"caf\xe9")
    Path(named).symlink_to(source)
    shutil.copytree(source, f"{named}2")
    for name in (named, f"{named}2"):
        assert cli.main(["merge", f"w8a8={name}", "--output", "merged", "--overwrite"]) == 0


def test_inspect_says_what_a_model_in_16_bit_is(tmp_path, capsys):
    """By itself, and merged with another."""
    plain = make_checkpoint(tmp_path / "plain", scheme=None)
    merge_checkpoints({"w4a16": plain, "w8a8": make_checkpoint(tmp_path / "w8a8")}, tmp_path / "merged")
    for folder in (plain, tmp_path / "merged"):
        assert cli.main(["inspect", str(folder)]) == 0
        assert "  16-bit weights, 16-bit activations\n" in capsys.readouterr().out


def test_a_log_gets_a_line_and_a_terminal_a_bar(capsys, monkeypatch):
    def shown() -> str:
        with _arguments.progress_bar("measuring", "size") as show:
            for done in range(4):
                show(done, 3)
        return capsys.readouterr().err

    assert shown() == "measuring ...\n"
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda _: True, raising=False)
    assert "\r" in shown()


@pytest.mark.parametrize("command", ["inspect", "split"])
@pytest.mark.parametrize("name", ["nowhere", "empty", "broken"])
def test_a_folder_that_is_no_merged_checkpoint_is_named_once(tmp_path, command, name, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    options = {"split": ["--variant", "w8a8", "--output", "out"]}
    assert cli.main([command, str(tmp_path / name), *options.get(command, [])]) == 1
    message = capsys.readouterr().err
    assert message.count(str(tmp_path / name)) == 1
    assert "give the folder that 'flexquant merge' wrote" in message
