# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A writer that is killed anywhere leaves the old output or none, never a mixture; what is others' stays."""

import errno
import os
import signal
import stat
import sys
from pathlib import Path

import pytest

from flexquant.checkpoint.output import prepare_output, remove_leftovers, staged_file, staged_folder
from flexquant.errors import FlexQuantError
from flexquant.quantization.report import REPORT_FILE
from tests.refusals import refused


def write(output: Path, text: str) -> None:
    prepare_output(output, [], overwrite=True)
    with staged_folder(output, overwrite=True) as stage:
        for name in ("config.json", "weights"):
            (stage / name).write_text(text)


def put(file: Path, text: str) -> Path:
    """Write a file; return where its text was until it was whole."""
    with staged_file(file) as partial:
        partial.write_text(text)
    return partial


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()} if folder.exists() else {}


def whole(text: str) -> dict[str, str]:
    return {"config.json": text, "weights": text}


def test_of_two_writers_the_later_one_has_the_output_whole(tmp_path):
    output = tmp_path / "merged"
    with refused("another process has begun"), staged_folder(output) as stage:
        (stage / "config.json").write_text("first")
        with staged_folder(output) as other:
            (other / "config.json").write_text("second")
            (other / "weights").write_text("second")
        (stage / "weights").write_text("first")
    assert contents(output) == whole("second") and list(tmp_path.iterdir()) == [output]


def test_two_outputs_in_one_folder_are_written_side_by_side(tmp_path):
    with staged_folder(tmp_path / "a"), staged_folder(tmp_path / "b"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def write_and_die_early(folder: Path, fatal: int) -> bool:
    """Write in a process that kills itself before an audited operation on ``folder``; return if it did."""
    operations = 0

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal operations
        if any(str(folder) in str(part) for part in arguments):
            operations += 1
            if operations == fatal:
                os.kill(os.getpid(), signal.SIGKILL)

    if (child := os.fork()) == 0:
        try:
            sys.addaudithook(count)
            write(folder / "merged", "new")
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("replaces", [True, False])
def test_killed_before_any_operation_it_leaves_the_old_output_or_none(tmp_path, replaces):
    died, fatal, lost_sight_of = True, 0, False
    while died:
        fatal += 1
        folder = tmp_path / str(fatal)
        folder.mkdir()
        old: dict[str, str] = {}
        if replaces:
            write(folder / "merged", "old")
            old = whole("old")
        died = write_and_die_early(folder, fatal)
        if replaces and not (folder / "merged").exists():
            lost_sight_of = True
            (folder / "merged").mkdir()
            with refused(r"an empty folder appeared at .*; move one of them away"):
                prepare_output(folder / "merged", [], overwrite=True)
            (folder / "merged").rmdir()
        prepare_output(folder / "merged", [], overwrite=True)  # the next run cleans up
        assert contents(folder / "merged") in ([old, whole("new")] if died else [whole("new")]), fatal
        write(folder / "merged", "newer")
        assert contents(folder / "merged") == whole("newer"), fatal
        assert list(folder.iterdir()) == [folder / "merged"], fatal
    assert fatal > 10 and lost_sight_of == replaces


def test_a_variant_that_lost_its_config_may_be_replaced(tmp_path):
    make_folder(tmp_path / "w8a8", REPORT_FILE)
    write(tmp_path / "w8a8", "new")
    assert contents(tmp_path / "w8a8") == whole("new")


@pytest.mark.parametrize("name", ["merged", "link to it"])
def test_an_empty_folder_is_an_output(name, tmp_path):
    (tmp_path / "merged").mkdir()
    (tmp_path / "link to it").symlink_to("merged")
    prepare_output(tmp_path / name, [], overwrite=False)
    with staged_folder(tmp_path / name) as stage:
        (stage / "config.json").write_text("new")
    assert contents(tmp_path / "merged") == {"config.json": "new"}
    assert (tmp_path / "link to it").is_symlink() and len(list(tmp_path.iterdir())) == 2


def make_folder(path: Path, file: str = "thesis.txt") -> None:
    path.mkdir()
    (path / file).write_text("precious")


APPEARING = {
    "a folder with thesis.txt": make_folder,
    "a folder with config.json": lambda path: make_folder(path, "config.json"),
    "a file": Path.touch,
    "a link": lambda path: path.symlink_to("elsewhere"),
}


def inventory(folder: Path) -> dict[str, tuple[int, int]]:
    """Return everything below a folder, with inode and time of writing."""
    found = {path.relative_to(folder).as_posix(): path.lstat() for path in folder.rglob("*")}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in found.items()}


@pytest.mark.parametrize(
    "what, overwrite",
    [(what, False) for what in APPEARING] + [("a folder with thesis.txt", True), ("a file", True)],
)
def test_what_appears_meanwhile_is_told_and_stays(what, overwrite, tmp_path):
    output = tmp_path / "merged"
    prepare_output(output, [], overwrite=overwrite)
    told = refused(f"^{what} appeared at .*merged while .* choose another")
    with told, staged_folder(output, overwrite=overwrite) as stage:
        (stage / "config.json").write_text("new")
        APPEARING[what](output)
        kept = {name: found for name, found in inventory(tmp_path).items() if name.startswith("merged")}
    assert inventory(tmp_path) == kept and len(kept) > 0


def test_a_checkpoint_that_appears_meanwhile_is_replaced_when_told_to(tmp_path):
    with staged_folder(tmp_path / "merged", overwrite=True) as stage:
        (stage / "config.json").write_text("new")
        make_folder(tmp_path / "merged", "config.json")
    assert contents(tmp_path / "merged") == {"config.json": "new"}
    assert list(tmp_path.iterdir()) == [tmp_path / "merged"]


def test_what_appears_between_the_two_renames_does_not_cost_the_old_copy(tmp_path, monkeypatch):
    output, rename = tmp_path / "merged", os.rename
    write(output, "old")

    def rename_slowly(source: Path, place: Path) -> None:
        rename(source, place)
        if source == output and any(tmp_path.glob(".merged.flexquant-tmp*/weights")):
            make_folder(output)

    told = "is what .* was to replace, and meanwhile a folder with thesis.txt appeared at .*; move one of"
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", rename_slowly)
        with refused("a folder with thesis.txt appeared at .*, and stays"):
            write(output, "new")
    for _ in range(2):
        with refused(told):
            remove_leftovers(output)
    os.rename(output, tmp_path / "mine")
    remove_leftovers(output)
    assert contents(output) == whole("old") and contents(tmp_path / "mine") == {"thesis.txt": "precious"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged", "mine"]


def test_what_others_keep_beside_an_output_stays(tmp_path):
    """The files and folders have names that programs use for what is half done, or was."""
    mine = [f"{dot}merged{end}" for dot in (".", "") for end in (".tmp", ".old", ".lock", ".new", ".bak")]
    for name in mine:
        make_folder(tmp_path / name)
    before = inventory(tmp_path)
    remove_leftovers(tmp_path / "merged")
    assert inventory(tmp_path) == before
    for text in ("one", "two"):
        write(tmp_path / "merged", text)
        put(tmp_path / "merged" / "weights", text)
        put(tmp_path / "merged.md", text)
    ours = ("merged", "merged.md", "merged/config.json", "merged/weights")
    assert {name: found for name, found in inventory(tmp_path).items() if name not in ours} == before


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("/", "/ is the root of the file system; choose a folder in it"),
        ("/tmp/..", "/tmp/.. is the root of the file system"),
        ("a\0b", "cannot be the name of a folder .*; choose another"),
        ("circle/merged", "circle/merged cannot be the name of a folder .*loop"),
        ("n" * 300, "cannot write n*: File name too long"),
    ],
)
def test_a_name_that_no_output_can_have_is_one_sentence(output, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("circle").symlink_to("circle")
    for attempt in (
        lambda: remove_leftovers(Path(output)),
        lambda: prepare_output(Path(output), [], overwrite=True),
        lambda: staged_folder(Path(output)).__enter__(),
    ):
        with refused(message):
            attempt()


@pytest.fixture
def synced(monkeypatch) -> dict[Path, tuple[int, int]]:
    """Return what has been synced to disk, keyed by its path at that time: inode and time of writing."""
    found: dict[Path, tuple[int, int]] = {}
    fsync = os.fsync

    def watched(fd: int) -> None:
        fsync(fd)
        stat = os.fstat(fd)
        found[Path(os.readlink(f"/proc/self/fd/{fd}"))] = (stat.st_ino, stat.st_mtime_ns)

    monkeypatch.setattr(os, "fsync", watched)
    return found


def test_everything_is_on_the_disk_before_the_output_or_a_file_is_in_its_place(synced, tmp_path):
    output = tmp_path / "merged"
    with staged_folder(output) as stage:
        (stage / "part").mkdir()
        for name in ("config.json", "part/weights"):
            (stage / name).write_text("new")
    final = {stage / name: found for name, found in inventory(output).items()}
    assert final == {path: synced[path] for path in final} and len(final) == 3
    assert {stage, tmp_path} <= synced.keys()
    assert synced[put(tmp_path / "file.json", "new")] == inventory(tmp_path)["file.json"]
    assert tmp_path in synced


OUTPUTS = {"folder": lambda at: write(at / "merged", "new"), "file": lambda at: put(at / "merged", "new")}
NOT_POSSIBLE = ("EINVAL", "ENOTSUP", "EBADF", "ENOSYS", "EACCES")


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("kind", ["folder", "file"])
@pytest.mark.parametrize("answer", [*NOT_POSSIBLE, "EIO", "ENOSPC", "EDQUOT", "ESTALE", "EPERM", "EROFS"])
def test_a_folder_alone_may_be_left_unsynced_where_it_has_to(output, kind, answer, tmp_path, monkeypatch):
    fsync = os.fsync

    def answering(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode) == (kind == "folder"):
            raise OSError(getattr(errno, answer), os.strerror(getattr(errno, answer)))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", answering)
    if kind == "folder" and answer in NOT_POSSIBLE:
        OUTPUTS[output](tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["merged"]
        return
    with pytest.raises((OSError, FlexQuantError)):
        OUTPUTS[output](tmp_path)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (errno.EXDEV, "cannot write .*: .*cross-device.*; choose a folder"),
        (errno.ENOSYS, "cannot write .*: Function not implemented.*; choose a folder"),
        (errno.EBUSY, "where a disk is mounted"),
    ],
)
@pytest.mark.parametrize("there", [None, "old"])
def test_what_cannot_be_renamed_is_told_before_the_first_byte(answer, said, there, tmp_path, monkeypatch):
    output, rename = tmp_path / "merged", os.rename
    if there:
        write(output, there)
    before = inventory(tmp_path)

    def answering(source: Path, place: Path) -> None:
        if not there or source == output:
            raise OSError(answer, os.strerror(answer), str(source))
        rename(source, place)

    monkeypatch.setattr(os, "rename", answering)
    with refused(said), staged_folder(output, overwrite=True):
        pytest.fail("writing began")
    assert inventory(tmp_path) == before


def test_a_folder_in_the_place_of_a_file_or_the_other_way_round_is_one_sentence(tmp_path):
    with refused(f"^{tmp_path} is a folder; name a file$"), staged_file(tmp_path):
        pass
    (tmp_path / "file").write_text("")
    with refused(r"cannot write .*merged: .*file"):
        write(tmp_path / "file" / "merged", "new")
