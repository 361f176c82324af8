# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""All or nothing: an output folder is written beside its final place and renamed when it is complete.

The temporary folder ``.<name>.tmp-<pid>`` is removed on an error; what a killed process left behind is
removed by the next one that writes the same output.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flexquant.errors import FlexQuantError

AT_FDCWD = -100
RENAME_EXCHANGE = 2
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def prepare_output(output: Path, inputs: Sequence[Path], *, overwrite: bool) -> None:
    """Clean up what killed processes left of ``output``, and check that it may be written.

    Raises FlexQuantError when it exists and may not be replaced, or overlaps an input.
    """
    target = output.resolve()
    _clean_up_after_dead_processes(target)
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

    A folder already at ``output`` is removed last. Raises FlexQuantError for a full disk or another
    failure to write; ``output`` is then as it was before.
    """
    target = output.resolve()
    stage = _sibling(target, "tmp", os.getpid())
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        stage.mkdir()
        yield stage
        for path in (*stage.rglob("*"), stage):
            sync(path)
        _swap(stage, target)
        sync(target.parent)
    except OSError as e:
        if e.errno in DISK_FULL:
            raise FlexQuantError(
                f"the disk ran full while writing {output} ({e.strerror}); nothing is left of it, free some "
                "space or choose another disk"
            ) from e
        raise FlexQuantError(f"cannot write {output}: {e.strerror} ({e.filename})") from e
    finally:
        shutil.rmtree(stage, ignore_errors=True)


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


def _sibling(target: Path, kind: str, pid: int | str) -> Path:
    return target.parent / f".{target.name}.{kind}-{pid}"


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
    old = _sibling(target, "old", os.getpid())
    os.rename(target, old)
    try:
        os.rename(stage, target)
    except BaseException:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _clean_up_after_dead_processes(target: Path) -> None:
    for kind in ("old", "tmp"):
        for folder in target.parent.glob(_sibling(_literal(target), kind, "*").name):
            pid = folder.name.rpartition("-")[2]
            if not pid.isdigit() or _is_other_process(int(pid)):
                continue
            if kind == "old" and not target.exists():
                os.rename(folder, target)
            else:
                shutil.rmtree(folder, ignore_errors=True)


def _literal(path: Path) -> Path:
    return path.with_name(path.name.replace("[", "[[]").replace("*", "[*]").replace("?", "[?]"))


def _is_other_process(pid: int) -> bool:
    """Whether a process other than this one has the id (in a container the ids repeat)."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
