# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Define and parse the arguments that several subcommands share, and show progress."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flexquant.checkpoint.source import CASTS
from flexquant.errors import FlexQuantError, UsageError
from flexquant.evaluation.inputs import Settings

if TYPE_CHECKING:
    from flexquant.layers.sensitivity import Study

SIZE = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)
PERCENT = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*%")
COUNT = re.compile(r"\d{1,15}")
DEFAULTS = Settings(batch_sizes=(16,), samples=32, prompt_tokens=128, tokens=32)


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
    if not COUNT.fullmatch(text) or int(text) < 1:
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


def parse_number(text: str) -> float:
    """Return the finite number (an argparse type)."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number such as 0.1")
    return value


def parse_share(text: str) -> float:
    """Return the number above 0 and up to 1 (an argparse type)."""
    try:
        value = parse_number(text)
    except argparse.ArgumentTypeError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a share above 0 and up to 1, such as 0.9")
    return value


def add_effort(add: Callable[..., object], measured: str) -> None:
    """Add the options of :class:`flexquant.evaluation.comparison.Effort`."""
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


def add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        choices=tuple(CASTS),
        help="cast what is in 16 bit to this dtype; vLLM itself casts what is in 32 bit (default: as it is)",
    )


def add_shard_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-shard-size",
        type=parse_size,
        default=parse_size("5GB"),
        metavar="SIZE",
        help="most bytes of tensors in one file (default: 5GB)",
    )


def add_rows(parser: argparse.ArgumentParser, defaults: Settings) -> None:
    """Add the options of the rows of text that are scored."""
    for option, default, text in (
        ("--prompt-tokens", defaults.prompt_tokens, "tokens of a row that are prefilled"),
        ("--tokens", defaults.tokens, "tokens of a row that are forced and scored"),
    ):
        parser.add_argument(
            option, type=parse_count, default=default, metavar="N", help=f"{text} (default: %(default)s)"
        )
    parser.add_argument(
        "--seed",
        type=int,
        default=defaults.seed,
        metavar="N",
        help="seed of the rows (default: %(default)s)",
    )


@contextmanager
def progress_bar(title: str, unit: str = "") -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (done, total) that shows a bar on stderr, from its first call until all is done.

    If it is then called with a larger total, it shows another bar, which continues from there.
    ``unit`` is what is counted; without it the numbers are bytes.
    """
    from tqdm import tqdm

    bar: tqdm | None = None
    before = 0

    def show(done: int, total: int) -> None:
        nonlocal bar, before
        if bar is None:
            bar = tqdm(
                desc=title, initial=before, total=total, leave=False, unit=unit or "B", unit_scale=not unit
            )
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


def add_study(parser: argparse.ArgumentParser, files: str) -> None:
    """Add the options of a study of layers; ``files`` names the files that are written into ``--output``."""
    add = parser.add_argument
    add("folder", type=Path, metavar="OUT", help="merged checkpoint")
    add("--text", type=Path, required=True, metavar="FILE", help="text or .jsonl file to measure on")
    add("--reference", metavar="MODEL", help="folder or Hugging Face id of the 16-bit model")
    add("--output", type=Path, required=True, metavar="DIR", help=f"folder for {files}")
    add("--overwrite", action="store_true", help="discard earlier results in the output, and begin anew")
    add(
        "--variants",
        type=parse_names,
        metavar="NAMES",
        help="comma-separated variants that layers may be in, or policies of one variant such as w4a8 "
        "(default: those of the checkpoint)",
    )
    add(
        "--batch-size",
        type=parse_count,
        default=DEFAULTS.batch_sizes[0],
        metavar="N",
        help="sequences in a decode pass (default: %(default)s)",
    )
    add(
        "--samples",
        type=parse_count,
        default=DEFAULTS.samples,
        metavar="N",
        help="rows of text, a multiple of the batch size (default: %(default)s)",
    )
    add_rows(parser, DEFAULTS)


def study_of(args: argparse.Namespace) -> Study:
    """Return the study that the options describe; raise FlexQuantError for inputs that cannot be measured."""
    from flexquant.evaluation.inputs import Subject
    from flexquant.layers.sensitivity import Study
    from flexquant.tuning.candidates import find_variants

    settings = Settings((args.batch_size,), args.samples, args.prompt_tokens, args.tokens, args.seed)
    subject = Subject.open(args.folder)
    variants = find_variants(subject.checkpoint.merged, args.variants)
    return Study(subject, variants, args.text, args.reference, settings)


def tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def save_plot(file: Path, draw: Callable[[Path], None]) -> None:
    """Draw a plot into ``file``; say on stderr why there is none, since a missing plot is no failure."""
    from flexquant.checkpoint.output import staged_file

    try:
        with staged_file(file) as partial:
            draw(partial)
    except FlexQuantError as e:
        print(f"no plot: {e}", file=sys.stderr)
