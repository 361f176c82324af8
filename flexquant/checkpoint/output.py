# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Write an output all or nothing: beside its final place, where it is renamed once it is complete.

A folder is written as ``.<name>.flexquant-tmp-<random>``; a later writer of the same output removes it, and
the earlier one fails. A folder to be replaced is renamed to ``.<name>.flexquant-old`` just before, and comes
back if the new one cannot take its place, or at the next run after a kill. A file is written as
``.<name>.flexquant-new-<random>``; the last of several writers has it. Nothing else beside an output is
touched, and what appears at its place meanwhile stays, unless it may be replaced.
"""

import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from flexquant.checkpoint.weight_bytes import format_bytes
from flexquant.documents.results import different_keys
from flexquant.errors import FlexQuantError, UsageError

Content = TypeVar("Content")

CHECKPOINT_FILES = ("config.json", "quantization_report.json")
"""Files that mark a folder that may be replaced: a checkpoint, or a variant that lost its config."""
STAGE, OLD, NEW = "tmp", "old", "new"
"""Parts of the names of FlexQuant's own files and folders beside an output."""
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
TAKEN = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}
"""Errors of renaming a folder to where there is a folder with files, a file or a link."""
NO_SUCH_CALL = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS, errno.EACCES}
"""Errors of syncing a folder on file systems that cannot, and of one that may be written but not read."""
ABANDONED = 86_400
"""Seconds after which a half-written file is a killed process's leftover."""


def remove_leftovers(output: Path) -> None:
    """Remove killed processes' leftovers; raise FlexQuantError if a moved folder cannot come back."""
    target = _resolved(output)
    with _explained(output):
        old = _beside(target, OLD)
        if old.exists() and not os.path.lexists(target):
            os.rename(old, target)
        elif old.exists() and not _is_checkpoint(target):
            problem = f"{old} is what a run that ended half way was to replace"
            meanwhile = f"and meanwhile {_describe(target)} appeared at {target}"
            raise FlexQuantError(f"{problem}, {meanwhile}; move one of them away")
        for folder in (old, *_all_beside(target, STAGE)):
            if folder.exists():
                shutil.rmtree(folder)


def prepare_output(output: Path, inputs: Sequence[Path], *, overwrite: bool) -> None:
    """Remove leftovers; raise FlexQuantError if ``output`` may not be replaced, or overlaps an input."""
    remove_leftovers(output)
    target = _resolved(output)
    for folder in inputs:
        source = Path(os.path.realpath(folder))
        if target.is_relative_to(source) or source.is_relative_to(target):
            raise FlexQuantError(f"the output {output} overlaps the input {folder}; choose another folder")
    existing = next(path for path in target.parents if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise FlexQuantError(f"cannot write {output}: {existing} is no folder to write into; choose another")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise FlexQuantError(f"{output} exists; choose another folder, or replace it with --overwrite")
    if not _is_checkpoint(output):
        raise FlexQuantError(f"{output} is not a checkpoint folder, so it stays; choose another folder")


def check_free_space(output: Path, needed: int) -> None:
    """Raise FlexQuantError if the disk of ``output`` has fewer than ``needed`` bytes free."""
    existing = next(p for p in (output.resolve(), *output.resolve().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        problem = f"writing {output} needs {format_bytes(needed)} of free disk space"
        there = f"but {existing} has {format_bytes(free)}"
        raise FlexQuantError(f"{problem}, {there}; free some or choose another disk")


@contextmanager
def staged_folder(output: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder to write into, which takes the place of ``output`` at the end.

    It replaces an empty folder or, with ``overwrite``, a checkpoint; else, and if writing fails, it raises.
    """
    remove_leftovers(output)
    target = _resolved(output)
    stage = _beside(target, f"{STAGE}-{uuid.uuid4().hex[:8]}")
    with _explained(output):
        target.parent.mkdir(parents=True, exist_ok=True)
        stage.mkdir()
        try:
            for folder, name in ((stage, f"{STAGE}-{uuid.uuid4().hex[:8]}"), (target, OLD)):
                if folder.is_dir():  # what cannot be renamed at the end is told now
                    os.rename(folder, _beside(target, name))
                    os.rename(_beside(target, name), folder)
            yield stage
            for path in (*stage.rglob("*"), stage):
                _sync(path)
            _put_in_place(stage, target, replaces=overwrite and _is_checkpoint(target))
            _sync(target.parent)
        except FileNotFoundError as e:
            if stage.exists():
                raise
            problem = f"another process has begun to write {output}, and removed what this one wrote"
            raise FlexQuantError(f"{problem}; let one write at a time") from e
        finally:
            shutil.rmtree(stage, ignore_errors=True)


@contextmanager
def staged_file(file: Path) -> Iterator[Path]:
    """Yield a path beside ``file`` to write to, which takes the place of ``file`` if the block succeeds.

    A link's target is replaced; a device or pipe is written to directly. Raises FlexQuantError for a folder.
    """
    if file.is_dir():
        raise FlexQuantError(f"{file} is a folder; name a file")
    if file.exists() and not file.is_file():
        yield file
        return
    target = Path(os.path.realpath(file))
    for left in _all_beside(target, NEW):
        with suppress(OSError):
            if left.lstat().st_mtime < time.time() - ABANDONED:
                left.unlink()
    partial = _beside(target, f"{NEW}-{uuid.uuid4().hex[:8]}")
    try:
        yield partial
        _sync(partial)
        os.replace(partial, target)
        _sync(target.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def write_text(file: Path, text: str) -> None:
    """Write a text file as UTF-8; raise and leave ``file`` unchanged as :func:`staged_file` does."""
    with staged_file(file) as partial:
        partial.write_text(text, encoding="utf-8")


def read_earlier(
    file: Path,
    inputs: Mapping[str, object],
    read: Callable[[str], tuple[Mapping[str, object], Content]],
    *,
    foreign: str,
    other: str,
    error: type[FlexQuantError] = UsageError,
) -> Content | None:
    """Return what an earlier run with the same ``inputs`` left in ``file``; None if there is no such file.

    ``read`` returns the inputs that a text records, and its content. Raises ``error`` with ``<file>
    <foreign>`` if ``read`` cannot, ``{}`` being the reason, and with ``<file> <other>`` for other inputs,
    ``{}`` being their names.
    """
    try:
        recorded, content = read(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise error(f"{file} {foreign.format(repr(e))}") from e
    if different := different_keys(inputs, recorded):
        raise error(f"{file} {other.format(', '.join(different))}")
    return content


def _sync(path: Path) -> None:
    """Wait until a file's content is on the disk; for a folder, if its file system can."""
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as e:
        if not (path.is_dir() and e.errno in NO_SUCH_CALL):
            raise


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


def _all_beside(target: Path, what: str) -> list[Path]:
    """Return the paths of FlexQuant's own files or folders of one kind beside ``target``."""
    return [path for path in target.parent.glob(".*") if path.name.startswith(_beside(target, what).name)]


@contextmanager
def _explained(output: Path) -> Iterator[None]:
    """Turn an OSError in the block into a FlexQuantError that names the output."""
    try:
        yield
    except OSError as e:
        place = f" ({e.filename})" if e.filename else ""
        problem = f"cannot write {output}: {e.strerror or e}{place}; choose a folder that can be written"
        if e.errno in DISK_FULL:
            advice = "nothing is left of it, free some space or choose another disk"
            problem = f"the disk ran full while writing {output} ({e.strerror}); {advice}"
        elif e.errno == errno.EBUSY:
            problem = f"{output} is where a disk is mounted; choose a folder on that disk"
        raise FlexQuantError(problem) from e


def _put_in_place(stage: Path, target: Path, *, replaces: bool) -> None:
    """Rename ``stage`` to ``target``, which it ``replaces``; raise FlexQuantError for what may not go."""
    old = _beside(target, OLD)
    if replaces:
        os.rename(target, old)
    try:
        os.rename(stage, target)  # this replaces an empty folder and nothing else
    except OSError as e:
        if e.errno not in TAKEN:
            raise
        problem = f"{_describe(target)} appeared at {target} while it was being written, and stays"
        advice = "choose another folder, or move away what is there and start again"
        raise FlexQuantError(f"{problem}; {advice}") from e
    finally:
        if replaces and not os.path.lexists(target):
            os.rename(old, target)
    if replaces:
        shutil.rmtree(old, ignore_errors=True)


def _is_checkpoint(folder: Path) -> bool:
    return any((folder / name).is_file() for name in CHECKPOINT_FILES)


def _describe(path: Path) -> str:
    """Describe what is at a path, e.g. ``a folder with config.json``."""
    if path.is_symlink() or not path.is_dir():
        return "a link" if path.is_symlink() else "a file"
    names = sorted(os.listdir(path))
    some = f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
    return f"a folder with {some}" if names else "an empty folder"
