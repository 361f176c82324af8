# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A child process that answers requests: what it measures can neither harm the parent nor be slowed by it.

Requests and replies are lines of JSON. Replies have a pipe of their own, named by the child's first argument:
whatever a library prints, at import too, goes to a log.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO


class WorkerError(Exception):
    """The child failed, ended, or did not answer in time."""


class Worker:
    """``python -m MODULE FD``, started at the first request and again after it was lost."""

    def __init__(self, module: str, log: Path, environment: dict[str, str] | None = None) -> None:
        self._command = [sys.executable, "-m", module]
        self._log = log
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[str] | None = None
        self._replies: TextIO | None = None

    def call(self, request: Any, timeout: float) -> Any:
        """Return the child's reply; raise WorkerError after ``timeout`` seconds, or with what it raised."""
        if self._process is None:
            replies, theirs = os.pipe()
            with open(self._log, "a") as log:
                self._process = subprocess.Popen(
                    [*self._command, str(theirs)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    text=True,
                    env=self._environment,
                    pass_fds=[theirs],
                )
            os.close(theirs)
            self._replies = open(replies)  # noqa: SIM115 - closed with the process
        assert self._process.stdin is not None and self._replies is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        if not select.select([self._replies], [], [], timeout)[0]:
            self.close()
            raise WorkerError(f"no answer within {timeout:.0f} s")
        line = self._replies.readline()
        if not line:
            code = self._process.wait()
            self.close()
            raise WorkerError(f"the process ended with code {code}; see {self._log.name}")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply["reply"]

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._replies is not None:
            self._replies.close()
            self._replies = None


def answer_requests(answer: Callable[[Any], Any]) -> None:
    """Be the child: answer every request until there are no more; what ``answer`` raises is the reply."""
    replies = os.fdopen(int(sys.argv[1]), "w")
    for line in sys.stdin:
        try:
            reply = {"reply": answer(json.loads(line))}
        except Exception as e:
            traceback.print_exc()
            reply = {"error": f"{type(e).__name__}: {e}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
