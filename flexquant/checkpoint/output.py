# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Write an output all or nothing: beside its final place, where it is renamed once it is complete.

The writer of a folder holds a lock on the file ``.<name>.flexquant-lock`` beside it while its stage,
``.<name>.flexquant-tmp``, exists. The system releases the lock however the process ends, so the holder of the
lock knows that a stage it finds belongs to a dead process, whatever machine or container that ran on. Nothing
else beside an output is touched. A file or folder that appears at the output's place meanwhile stays, unless
it may be replaced.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from flexquant.checkpoint.weight_bytes import format_bytes
from flexquant.errors import FlexQuantError

AT_FDCWD = -100
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
CHECKPOINT_FILES = ("config.json", "quantization_report.json")
"""Files that mark a folder that may be replaced: a checkpoint, or a variant that lost its config."""
LOCK, STAGE, OLD, NEW = "lock", "tmp", "old", "new"
"""Last parts of the names of FlexQuant's own files and folders beside an output."""
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def remove_leftovers(output: Path) -> None:
    """Remove the leftovers of killed processes beside ``output``, but not ``output`` itself.

    Raises FlexQuantError if another process is writing ``output``.
    """
    target = _resolved(output)
    with _explained(output):
        if any(_beside(target, what).exists() for what in (LOCK, STAGE, OLD)):
            with _locked(target):
                _clean_up(target)


def prepare_output(output: Path, inputs: Sequence[Path], *, overwrite: bool) -> None:
    """Remove the leftovers of killed processes beside ``output``, and check that it may be written.

    Raises FlexQuantError if it exists and may not be replaced (an empty folder always may), overlaps an
    input, or is being written by another process.
    """
    remove_leftovers(output)
    target = _resolved(output)
    for folder in inputs:
        source = Path(os.path.realpath(folder))
        if target.is_relative_to(source) or source.is_relative_to(target):
            raise FlexQuantError(f"the output {output} overlaps the input {folder}; choose another folder")
    if not output.exists() or _is_empty(output):
        return
    if not overwrite:
        raise FlexQuantError(f"{output} exists; choose another folder, or replace it with --overwrite")
    if not _is_checkpoint(output):
        raise FlexQuantError(
            f"{output} is not a checkpoint folder, so it is not replaced; choose another folder"
        )


def check_free_space(output: Path, needed: int) -> None:
    """Raise FlexQuantError if the disk of ``output`` has fewer than ``needed`` bytes free."""
    existing = next(p for p in (output.resolve(), *output.resolve().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise FlexQuantError(
            f"writing {output} needs {format_bytes(needed)} of free disk space, but {existing} has "
            f"{format_bytes(free)}; free some or choose another disk"
        )


@contextmanager
def staged_folder(output: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder to write into, which takes the place of ``output`` at the end.

    An empty folder that is at ``output`` now is replaced and, with ``overwrite``, a checkpoint that is there
    by then. Raises FlexQuantError for anything else there, an output that another process is writing, a full
    disk or another failure to write; ``output`` is then unchanged.
    """
    target = _resolved(output)
    stage = _beside(target, STAGE)
    with _explained(output):
        was_empty = _is_empty(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target):
            _clean_up(target)
            stage.mkdir()
            try:
                yield stage
                for path in (*stage.rglob("*"), stage):
                    sync(path)
                _swap(stage, target, overwrite, was_empty)
                sync(target.parent)
            finally:
                # Otherwise the stage marks that `target` holds something foreign.
                if not _beside(target, OLD).exists():
                    shutil.rmtree(stage, ignore_errors=True)


@contextmanager
def staged_file(file: Path) -> Iterator[Path]:
    """Yield a path beside ``file`` to write to, which takes the place of ``file`` at the end.

    If the process fails or dies before, ``file`` is unchanged; if it fails, the partial file is removed too.
    A link is kept, and its target is replaced; a device or pipe is written to directly. Nothing is locked, so
    two processes must not write one file at the same time. Raises FlexQuantError for a folder.
    """
    if file.is_dir():
        raise FlexQuantError(f"{file} is a folder; name a file")
    if file.exists() and not file.is_file():
        yield file
        return
    target = Path(os.path.realpath(file))
    partial = _beside(target, NEW)
    try:
        yield partial
        sync(partial)
        os.replace(partial, target)
        sync(target.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def write_text(file: Path, text: str) -> None:
    """Write a text file as UTF-8; raise and leave ``file`` unchanged as :func:`staged_file` does."""
    with staged_file(file) as partial:
        partial.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Wait until a file's or folder's content is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _resolved(output: Path) -> Path:
    """Return the absolute path without links; raise FlexQuantError for a path that no folder can have."""
    try:
        target = output.resolve()
    except (OSError, RuntimeError, ValueError) as e:  # links in a circle, a zero byte ...
        raise FlexQuantError(f"{output} cannot be the name of a folder ({e}); choose another folder") from e
    if not target.name:
        raise FlexQuantError(f"{output} is the root of the file system; choose a folder in it")
    return target


def _beside(target: Path, what: str) -> Path:
    """Return the path of FlexQuant's own file or folder ``what`` beside ``target``."""
    return target.with_name(f".{target.name}.flexquant-{what}")


@contextmanager
def _explained(output: Path) -> Iterator[None]:
    """Turn an OSError in the block into a FlexQuantError that names the output."""
    try:
        yield
    except OSError as e:
        if e.errno in DISK_FULL:
            raise FlexQuantError(
                f"the disk ran full while writing {output} ({e.strerror}); nothing is left of it, free some "
                "space or choose another disk"
            ) from e
        if e.errno == errno.EBUSY:
            raise FlexQuantError(f"{output} is where a disk is mounted; choose a folder on that disk") from e
        place = f" ({e.filename})" if e.filename else ""
        raise FlexQuantError(
            f"cannot write {output}: {e.strerror or e}{place}; choose a folder that can be written"
        ) from e


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold the lock of an output; raise FlexQuantError while another process holds it."""
    path = _beside(target, LOCK)
    fd = _lock(path, target)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def _lock(path: Path, target: Path) -> int:
    """Lock the file at ``path`` and return its descriptor; closing it releases the lock."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(fd, path):
                return fd
        except BlockingIOError as e:
            os.close(fd)
            raise FlexQuantError(
                f"{target} is being written by another process, which holds the lock {path}; wait until it "
                "has finished, or choose another folder"
            ) from e
        except OSError as e:
            os.close(fd)
            raise FlexQuantError(
                f"{target} cannot be locked against a second writer ({e.strerror}); choose a folder on a "
                "file system with locks, and copy the result"
            ) from e
        os.close(fd)  # the earlier holder removed the file after it was opened here


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _swap(stage: Path, target: Path, overwrite: bool, was_empty: bool) -> None:
    """Move ``stage`` to ``target``; the former target is afterwards at ``stage``, or deleted.

    ``was_empty``: an empty folder was at ``target`` from the beginning.

    Raises FlexQuantError if ``target`` holds something that may not be replaced.
    """
    if _renamed(stage, target, RENAME_NOREPLACE):
        return
    if not os.path.lexists(target) or (was_empty and _is_empty(target)):
        os.rename(stage, target)  # this can replace at most an empty folder
        return
    if not (overwrite and _is_checkpoint(target)):
        raise FlexQuantError(
            f"{_describe(target)} appeared at {target} while it was being written, and stays; choose another "
            "folder, or move away what is there and start again"
        )
    if _renamed(stage, target, RENAME_EXCHANGE):
        return
    # Without an atomic exchange, a crash between the two renames leaves `old`, which the next run restores.
    old = _beside(target, OLD)
    os.rename(target, old)
    try:
        os.rename(stage, target)
    except BaseException:
        _put_back(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _renamed(stage: Path, target: Path, flag: int) -> bool:
    """Rename ``stage`` with a flag that not every file system supports; return whether it worked."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    done: int = renameat2(AT_FDCWD, bytes(stage), AT_FDCWD, bytes(target), flag)
    return done == 0


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not folder.is_symlink() and not os.listdir(folder)


def _is_checkpoint(folder: Path) -> bool:
    return any((folder / name).is_file() for name in CHECKPOINT_FILES)


def _describe(path: Path) -> str:
    """Describe what is at a path, e.g. ``a folder with config.json``."""
    if path.is_symlink() or not path.is_dir():
        return "a link" if path.is_symlink() else "a file"
    names = sorted(os.listdir(path))
    if not names:
        return "an empty folder"
    return f"a folder with {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"


def _clean_up(target: Path) -> None:
    """Remove a dead process's leftovers, after restoring a folder that it had moved out of the way."""
    old, stage = _beside(target, OLD), _beside(target, STAGE)
    if old.exists() and (stage.exists() or not target.exists()):
        _put_back(target)
    for folder in (old, stage):
        if folder.exists():
            shutil.rmtree(folder)


def _put_back(target: Path) -> None:
    """Restore the folder that was moved out of the way; raise FlexQuantError if its place is taken."""
    old = _beside(target, OLD)
    if os.path.lexists(target):
        raise FlexQuantError(
            f"{old} is what a run that ended half way was to replace, and meanwhile {_describe(target)} "
            f"appeared at {target}; move one of them away"
        )
    os.rename(old, target)
