# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Parse arguments that several subcommands share (``name=DIR``, sizes, rounds), and show progress bars."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from flexquant.errors import UsageError

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)
PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")


def parse_folders(pairs: Sequence[str]) -> list[tuple[str, str]]:
    """Return (variant name, folder) for each ``name=DIR``; raise UsageError for anything else."""
    parsed = [pair.partition("=") for pair in pairs]
    for pair, (name, _, folder) in zip(pairs, parsed, strict=True):
        if not name or not folder:
            raise UsageError(f"'{pair}' is not NAME=DIR; write e.g. w8a8=path/to/checkpoint")
    return [(name, folder) for name, _, folder in parsed]


def parse_size(text: str) -> int:
    """Return the bytes of e.g. ``5GB``, ``500MB`` or ``2GiB`` (an argparse type)."""
    match = SIZE.fullmatch(text.strip())
    size = 0
    if match:
        unit = 1024 if match[3] else 1000
        size = int(float(match[1]) * unit ** " KMGT".index(match[2].upper() or " "))
    if size < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size such as 5GB, 500MB or 2GiB")
    return size


def parse_count(text: str) -> int:
    """Return a whole number of at least 1 (an argparse type)."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return int(text)


def parse_names(text: str) -> tuple[str, ...]:
    """Return the parts of a comma-separated list of at least one (an argparse type)."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise argparse.ArgumentTypeError("the list is empty; name at least one, with commas between them")
    return names


def parse_counts(text: str) -> tuple[int, ...]:
    """Return comma-separated whole numbers of at least 1 (an argparse type)."""
    return tuple(parse_count(part) for part in parse_names(text))


def parse_percent(text: str) -> float:
    """Return the share, above 0, of e.g. ``3%`` or ``0.5 %`` (an argparse type)."""
    match = PERCENT.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a percentage above 0 such as 3%")
    return float(match[1]) / 100


def add_effort(add: Callable[..., Any], measured: str) -> None:
    """Add the options of :class:`flexquant.measuring.comparison.Effort` with a parser's ``add_argument``."""
    add(
        "--rounds",
        type=parse_count,
        metavar="N",
        help=f"rounds of {measured} (default: by the machine); if given alone, no rounds are added",
    )
    add("--max-rounds", type=parse_count, metavar="N", help="most rounds, added ones included")
    add(
        "--width",
        type=parse_percent,
        metavar="X%",
        help="add rounds while the 95 %% interval of a ratio is wider than this (default: 3%%)",
    )


def add_shard_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-shard-size",
        type=parse_size,
        default=parse_size("5GB"),
        metavar="SIZE",
        help="most bytes of tensors in one file (default: 5GB)",
    )


@contextmanager
def progress_bar(title: str, **unit: Any) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (done, total) that shows a bar on stderr, from its first call until all is done.

    If it is then called with a larger total, it shows another bar, which continues from there. ``unit`` are
    arguments for tqdm; without them the numbers are bytes.
    """
    from tqdm import tqdm

    bar: tqdm | None = None
    before = 0

    def show(done: int, total: int) -> None:
        nonlocal bar, before
        if bar is None:
            about = unit or {"unit": "B", "unit_scale": True}
            bar = tqdm(desc=title, initial=before, total=total, leave=False, **about)
        bar.update(done - bar.n)
        before = done
        if done == total:
            bar.close()
            bar = None

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()
