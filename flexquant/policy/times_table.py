# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Format times of passes as a table for terminals and comments, with the plan that a policy chooses."""

from __future__ import annotations

from collections.abc import Callable

from flexquant.policy.pass_times import PassTimes, Time

UNITS = {"decode": "sequences", "prefill": "tokens"}


def format_times(times: PassTimes, plan: Callable[[str, int], str]) -> list[str]:
    """Return the lines of a table of milliseconds, with a row per size and a column per variant.

    ``plan(phase, size)`` returns the name of the plan that the policy chooses.
    """
    lines = []
    for phase, curves in (("decode", times.decode), ("prefill", times.prefill)):
        sizes = sorted(set.intersection(*(set(curve) for curve in curves.values())))
        rows = [[f"{phase}, ms", *curves, "plan"]]
        for size in sizes:
            unit = UNITS[phase] if size > 1 else UNITS[phase].removesuffix("s")
            cells = [format_time(curve[size]) for curve in curves.values()]
            rows.append([f"{size} {unit}", *cells, plan(phase, size)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            lines.append("  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip())
        lines.append("")
    return lines[:-1]


def format_time(time: Time) -> str:
    """Return median, smallest and largest in milliseconds, e.g. ``60.1 (59.8-60.9)``."""
    median, low, high = (f"{1e3 * seconds:.3g}" for seconds in time)
    return median if low == median == high else f"{median} ({low}-{high})"
