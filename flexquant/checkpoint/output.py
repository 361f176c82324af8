# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""All or nothing: an output is written beside its final place and renamed when it is complete.

A folder's writer locks the file ``.<name>.lock`` beside it for as long as there is a stage, ``.<name>.tmp``.
The system lets go of the lock when the process ends in whatever way, so who holds it knows that a stage
found is that of a dead process, on whatever machine or in whatever container that process ran.
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

from flexquant.errors import FlexQuantError

AT_FDCWD = -100
RENAME_EXCHANGE = 2
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def remove_leftovers(output: Path) -> None:
    """Remove what killed processes left beside ``output``; what is at ``output`` stays.

    Raises FlexQuantError when another process is writing it.
    """
    target = output.resolve()
    with _explained(output):
        if any(path.exists() for path in (_lock_file(target), _stage(target), _old(target))):
            with _locked(target):
                _clean_up(target)


def prepare_output(output: Path, inputs: Sequence[Path], *, overwrite: bool) -> None:
    """Clean up what killed processes left of ``output``, and check that it may be written.

    Raises FlexQuantError when it exists and may not be replaced, overlaps an input, or is being written by
    another process.
    """
    remove_leftovers(output)
    target = output.resolve()
    for folder in inputs:
        source = folder.resolve()
        if target.is_relative_to(source) or source.is_relative_to(target):
            raise FlexQuantError(f"the output {output} overlaps the input {folder}; choose another folder")
    if not output.exists():
        return
    if not overwrite:
        raise FlexQuantError(f"{output} exists; choose another folder, or replace it with --overwrite")
    if not (output / "config.json").is_file():
        raise FlexQuantError(
            f"{output} is not a checkpoint folder, so it is not replaced; choose another folder"
        )


def check_free_space(output: Path, needed: int) -> None:
    """Raise FlexQuantError when the disk of ``output`` has fewer than ``needed`` bytes free."""
    existing = next(p for p in (output.resolve(), *output.resolve().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise FlexQuantError(
            f"writing {output} needs {format_bytes(needed)} of free disk space, but {existing} has "
            f"{format_bytes(free)}; free some or choose another disk"
        )


@contextmanager
def staged_folder(output: Path) -> Iterator[Path]:
    """Give a temporary folder to write into, which takes the place of ``output`` at the end.

    A folder already at ``output`` is removed last. Raises FlexQuantError for an output that another process
    is writing, a full disk or another failure to write; ``output`` is then as it was before.
    """
    target = output.resolve()
    stage = _stage(target)
    with _explained(output):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target):
            _clean_up(target)
            stage.mkdir()
            try:
                yield stage
                for path in (*stage.rglob("*"), stage):
                    sync(path)
                _swap(stage, target)
                sync(target.parent)
            finally:
                shutil.rmtree(stage, ignore_errors=True)


@contextmanager
def staged_file(file: Path) -> Iterator[Path]:
    """Give a path beside ``file`` to write to, which takes the place of ``file`` at the end.

    A process that fails or dies before leaves ``file`` as it was; one that fails, nothing beside it either.
    Nothing is locked: two processes must not write one file at the same time.
    """
    partial = file.with_name(f"{file.name}.new")
    try:
        yield partial
        os.replace(partial, file)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Wait until a file's or folder's content is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def format_bytes(count: float) -> str:
    """Return e.g. ``1.50 GB`` (decimal units, as disks are sold)."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def _lock_file(target: Path) -> Path:
    return target.with_name(f".{target.name}.lock")


def _stage(target: Path) -> Path:
    return target.with_name(f".{target.name}.tmp")


def _old(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


@contextmanager
def _explained(output: Path) -> Iterator[None]:
    """Turn an OSError inside into a FlexQuantError that names the output."""
    try:
        yield
    except OSError as e:
        if e.errno in DISK_FULL:
            raise FlexQuantError(
                f"the disk ran full while writing {output} ({e.strerror}); nothing is left of it, free some "
                "space or choose another disk"
            ) from e
        place = f" ({e.filename})" if e.filename else ""
        raise FlexQuantError(
            f"cannot write {output}: {e.strerror or e}{place}; choose a folder that can be written"
        ) from e


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold the lock of an output; raise FlexQuantError while another process holds it."""
    path = _lock_file(target)
    fd = _lock(path, target)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def _lock(path: Path, target: Path) -> int:
    """Return a descriptor of the file at ``path``, locked: closing it ends the lock."""
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
        os.close(fd)  # its holder removed it between the opening and the lock


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _swap(stage: Path, target: Path) -> None:
    """Put ``stage`` at ``target``; what was there is afterwards at ``stage``, or gone."""
    if not target.exists():
        os.rename(stage, target)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    renameat2 = getattr(libc, "renameat2", None)
    if renameat2 and renameat2(AT_FDCWD, bytes(stage), AT_FDCWD, bytes(target), RENAME_EXCHANGE) == 0:
        return
    # A file system without an atomic exchange: a crash between the two leaves `old`, restored next time.
    old = _old(target)
    os.rename(target, old)
    try:
        os.rename(stage, target)
    except BaseException:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _clean_up(target: Path) -> None:
    """Remove what a dead process left of an output, and put back what it had moved out of the way."""
    if not target.exists() and _old(target).exists():
        os.rename(_old(target), target)
    for folder in (_old(target), _stage(target)):
        if folder.exists():
            shutil.rmtree(folder)
