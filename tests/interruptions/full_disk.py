# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A small disk of its own for a command, filled up while the command runs."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.interruptions.started import SECONDS, Started

SIZE = 256 << 20
"""Bytes: more than any command that is interrupted takes."""
BLOCK = bytes(1 << 20)
SENTENCE = re.compile(r"^flexquant \w+: error: .*(disk|No space left)", re.MULTILINE)
"""The sentence with which a command says why it ended; an engine's log may follow it."""
OWN_MOUNTS = ["unshare", "--map-root-user", "--mount"]
"""Command prefix by which any user may mount, unseen by everybody else."""


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a file system of SIZE bytes, in memory, at an empty folder.

    Raises PermissionError where this user may not.
    """
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", folder], capture_output=True, text=True
    )
    if done.returncode:
        raise PermissionError(
            f"{folder}: {done.stderr.strip()}; run the command behind '{' '.join(OWN_MOUNTS)}'"
        )
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


class FullDisk:
    """Fills the disk that a folder lies on, and frees it again when the command has ended."""

    def __init__(self, folder: Path) -> None:
        self.ballast = folder / "ballast"

    def __call__(self, started: Started) -> None:
        """Fill the disk between two steps of a command, and wait until the command ends.

        Raises AssertionError if it neither succeeds nor ends in one sentence that says so.
        """
        try:
            with started.held():
                fill(self.ballast)
            status = started.wait(SECONDS)
        finally:
            started.kill()
            self.ballast.unlink()
        if status != 0:
            log = started.log.read_text()
            told = SENTENCE.search(log)
            assert status == 1 and told and "Traceback" not in log[: told.start()], (
                f"{status}:\n{log[-3000:]}"
            )


def fill(file: Path) -> None:
    """Write into a file until its disk takes no further byte."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(descriptor, BLOCK)
    except OSError as e:
        if e.errno != errno.ENOSPC:
            raise
    finally:
        os.close(descriptor)
