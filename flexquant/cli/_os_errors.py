# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Explain in one sentence what the system refused about a user's file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import flexquant

PACKAGE = Path(flexquant.__file__).parent

# Error about a path -> what to do about it.
ADVICE = {
    errno.EACCES: "give a path that you may read and write, or change its permissions",
    errno.EPERM: "give a path that you may read and write, or change its permissions",
    errno.EROFS: "its file system is read-only, so choose another folder",
    errno.ENOENT: "correct the path, or make the folder first",
    errno.ENOTDIR: "a part of the path is a file, so choose another folder",
    errno.EISDIR: "it is a folder, so give the path of a file",
    errno.EEXIST: "choose another name",
    errno.ENOTEMPTY: "choose another name",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "its links lead in a circle, so correct them",
    errno.EIO: "the disk or its connection fails, so check it",
    errno.ESTALE: "the network file system lost it, so mount it again",
    errno.ETXTBSY: "a process is using it, so choose another name",
}
FREE_SOME = "free some space, or write to another disk; TMPDIR says where temporary files go"
NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def explain_os_error(error: OSError | RuntimeError) -> str | None:
    """Return a sentence on a file that could not be read or written: the path, what failed, what to do.

    None for an error that no path of the user has caused: one about a file of this package, a connection or
    a process. Some libraries report a full disk in exceptions of their own, such as torch.distributed's.
    """
    if not isinstance(error, OSError):
        is_full = os.strerror(errno.ENOSPC) in str(error)
        return f"the disk is full ({error}); {FREE_SOME}" if is_full else None
    path = None if error.filename is None else os.fsdecode(error.filename)
    if path is not None and Path(path).is_relative_to(PACKAGE):
        return None
    if error.errno in NO_SPACE:
        where = f" while writing {path}" if path else ""
        return f"the disk is full{where} ({error.strerror}); {FREE_SOME}"
    if path is None or error.errno not in ADVICE:
        return None
    return f"cannot use {path}: {error.strerror}; {ADVICE[error.errno]}"
