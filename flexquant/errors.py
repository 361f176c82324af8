# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Define the exceptions for mistakes that a user can correct."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class FlexQuantError(Exception):
    """Bad input; the message says in one sentence what was found, what is allowed and what to do."""


class UsageError(FlexQuantError):
    """A command line that contradicts itself in a way that argparse does not detect (exit code 2)."""


@contextmanager
def explained(
    problem: str, advice: str, errors: tuple[type[Exception], ...] = (OSError, ValueError)
) -> Iterator[None]:
    """Turn one of ``errors`` in the block into a FlexQuantError: ``<problem> (<its first line>); <advice>``.

    It is meant for calls of libraries that read files or the Hugging Face hub.
    """
    try:
        yield
    except errors as e:
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise FlexQuantError(f"{problem} ({reason}); {advice}") from e
