# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Whether the machine had too little memory for its servers, so that programs waited for their own pages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PRESSURE = Path("/proc/pressure/memory")
STALLED = "memory_stalled_seconds"
"""Key in a measurement's result: the seconds for which all programs waited for memory."""
TOO_LONG = 0.01
"""Share of a measurement's time; one that waited for longer counts as disturbed."""


def stalled_seconds(file: Path = PRESSURE) -> float:
    """Return for how long all programs at once have waited for memory; 0 where the system does not tell.

    The time is the total of the line "full" in Linux's pressure stall information.
    """
    if not file.is_file():
        return 0.0
    found = re.search(r"^full .*total=(\d+)", file.read_text(), re.MULTILINE)
    return int(found[1]) / 1e6 if found else 0.0


def short_of_memory(results: Sequence[dict[str, Any]]) -> str:
    """Return how many of the measurements were disturbed, in a sentence; empty if none was."""
    disturbed = sum(result.get(STALLED, 0.0) > TOO_LONG * result["duration"] for result in results)
    if not disturbed:
        return ""
    return (
        f"In {disturbed} of {len(results)} measurements all programs waited for memory for more than "
        f"{TOO_LONG:.0%} of the time: take fewer subjects at once."
    )
