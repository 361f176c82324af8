# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Describe ranges of decoder layers, and the bytes of weights in each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

SHARED = "shared"
"""Key, in place of a variant's name, of what several variants share; no variant can have this name."""
BytesByRange = dict[str, dict[str, int]]
"""Variant or SHARED -> range of layers, e.g. ``0-3``, or an empty text for outside of layers -> bytes."""


def ranges(numbers: Iterable[int]) -> list[range]:
    """Return the runs of consecutive numbers, ascending."""
    runs: list[range] = []
    for number in sorted(numbers):
        if runs and number == runs[-1].stop:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


def describe_range(run: range) -> str:
    """Return e.g. ``0-3``, or ``29`` for one layer."""
    return str(run.start) if len(run) == 1 else f"{run.start}-{run.stop - 1}"


def describe_ranges(numbers: Iterable[int]) -> str:
    """Return e.g. ``0-3,29``."""
    return ",".join(map(describe_range, ranges(numbers)))


def by_range(nbytes: Mapping[int | None, int]) -> dict[str, int]:
    """Return the bytes of each run of consecutive layers from the bytes by layer; None: outside of layers."""
    runs = ranges(number for number in nbytes if number is not None)
    sizes = {describe_range(run): sum(nbytes[number] for number in run) for run in runs}
    return sizes | ({"": nbytes[None]} if nbytes.get(None) else {})


def format_bytes(nbytes: float) -> str:
    """Return e.g. ``12.0 MiB``, in the largest unit with a value of at least 1."""
    for unit in ("bytes", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} bytes" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


def describe_bytes(nbytes: BytesByRange) -> str:
    """Return e.g. ``w8a8 layers 0-3: 12.0 MiB, shared: 54.0 MiB``."""
    return ", ".join(
        f"{_part(name, run, of_name)}: {format_bytes(size)}"
        for name, of_name in nbytes.items()
        for run, size in of_name.items()
    )


def _part(name: str, run: str, of_name: Mapping[str, int]) -> str:
    if run:
        return f"{name} layers {run}"
    return name if len(of_name) == 1 else f"{name} outside layers"
