# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Define the exceptions for mistakes that a user can correct."""

from collections.abc import Iterator
from contextlib import contextmanager

MOST_SAID = 300
"""Most characters of a library's message that are shown."""


class FlexQuantError(Exception):
    """Bad input; the message says in one sentence what was found, what is allowed and what to do."""


class UsageError(FlexQuantError):
    """A command line that contradicts itself in a way that argparse does not detect (exit code 2)."""


def said_by(error: BaseException) -> str:
    """Return a library's error in at most MOST_SAID characters: its first line, and those after a colon.

    Of pydantic it is what is wrong at each place, and of an error without a text the name of its class.
    """
    if type(error).__name__ == "ValidationError" and callable(problems := getattr(error, "errors", None)):
        places = (".".join(str(key) for key in one["loc"] if "[" not in str(key)) for one in problems())
        texts = (one["msg"].removeprefix("Value error, ") for one in problems())
        lines = ["; ".join(": ".join(filter(None, told)) for told in zip(places, texts, strict=True))]
    else:
        lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    ends = (number for number, line in enumerate(lines, 1) if not line.endswith(":"))
    said = " ".join(lines[: next(ends, None)]) or type(error).__name__
    return said if len(said) <= MOST_SAID else f"{said[:MOST_SAID].rsplit(' ', 1)[0]} ..."


@contextmanager
def explained(
    problem: str, advice: str, errors: tuple[type[Exception], ...] = (OSError, ValueError)
) -> Iterator[None]:
    """Turn a library's error in the block into a FlexQuantError: ``<problem> (<its point>); <advice>``."""
    try:
        yield
    except errors as e:
        raise FlexQuantError(f"{problem} ({said_by(e)}); {advice}") from e
