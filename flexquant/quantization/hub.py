# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Errors of libraries that read files or the Hugging Face hub, as one sentence for the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flexquant.errors import FlexQuantError


@contextmanager
def explained(problem: str, advice: str) -> Iterator[None]:
    """Turn an OSError or ValueError inside into ``<problem> (<its first line>); <advice>``."""
    try:
        yield
    except (OSError, ValueError) as e:
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise FlexQuantError(f"{problem} ({reason}); {advice}") from e
