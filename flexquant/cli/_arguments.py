# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Define and parse the arguments that several subcommands share, and show progress."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexquant.errors import UsageError
from flexquant.evaluation.settings import Settings

if TYPE_CHECKING:
    from flexquant.layers.sensitivity import Study

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)
PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
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


def add_study(parser: argparse.ArgumentParser, files: str) -> None:
    """Add the options; ``files`` names the files that are written into ``--output``."""
    parser.add_argument("folder", type=Path, metavar="OUT", help="merged checkpoint")
    parser.add_argument(
        "--text", type=Path, required=True, metavar="FILE", help="text or .jsonl file to measure on"
    )
    parser.add_argument("--reference", metavar="MODEL", help="folder or Hugging Face id of the 16-bit model")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help=f"folder for {files}")
    parser.add_argument(
        "--overwrite", action="store_true", help="discard earlier results in the output, and begin anew"
    )
    parser.add_argument(
        "--variants",
        type=parse_names,
        metavar="NAMES",
        help="comma-separated variants that layers may be in, or policies of one variant such as w4a8 "
        "(default: those of the checkpoint)",
    )
    numbers = {
        "batch_size": (DEFAULTS.batch_sizes[0], "sequences in a decode pass"),
        "samples": (DEFAULTS.samples, "rows of text, a multiple of the batch size"),
        "prompt_tokens": (DEFAULTS.prompt_tokens, "tokens of a row that are prefilled"),
        "tokens": (DEFAULTS.tokens, "tokens of a row that are forced and scored"),
    }
    for name, (default, text) in numbers.items():
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=parse_count,
            default=default,
            metavar="N",
            help=f"{text} (default: %(default)s)",
        )
    parser.add_argument(
        "--seed", type=int, default=DEFAULTS.seed, metavar="N", help="seed of the rows (default: %(default)s)"
    )


def study_of(args: argparse.Namespace) -> Study:
    """Return the study that the options describe; raise FlexQuantError for inputs that cannot be measured."""
    from flexquant.evaluation.subject import Subject
    from flexquant.layers.sensitivity import Study
    from flexquant.tuning.candidates import find_variants

    settings = Settings((args.batch_size,), args.samples, args.prompt_tokens, args.tokens, args.seed)
    subject = Subject.open(args.folder)
    variants = find_variants(subject.checkpoint.merged, args.variants)
    return Study.of(subject, variants, args.text, args.reference, settings)


def tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
