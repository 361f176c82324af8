# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Define and parse the arguments that several subcommands share, and show progress."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.output import staged_file
from flexquant.checkpoint.safetensors_io import CASTS
from flexquant.checkpoint.writer import DEFAULT_SHARD_SIZE
from flexquant.errors import FlexQuantError, UsageError
from flexquant.evaluation.inputs import Settings, Subject
from flexquant.tuning.candidates import find_variants

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from flexquant.layers.sensitivity import Study

SIZE = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)
PERCENT = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*%")
COUNT = re.compile(r"\d{1,15}")
STUDY_DEFAULTS = Settings(batch_sizes=(16,), samples=32, prompt_tokens=128, tokens=32)


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


def parse_count(text: str, least: int = 1) -> int:
    """Return a whole number that is at least ``least`` (an argparse type)."""
    if not COUNT.fullmatch(text) or int(text) < least:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least {least}")
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
    """Return the finite number of at least 0 (an argparse type)."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number such as 0.1")
    return value


def parse_seed(text: str) -> int:
    """Return the whole number of at least 0 (an argparse type)."""
    return parse_count(text, least=0)


def parse_share(text: str) -> float:
    """Return the number above 0 and up to 1 (an argparse type)."""
    with suppress(argparse.ArgumentTypeError):
        if 0 < (value := parse_number(text)) <= 1:
            return value
    raise argparse.ArgumentTypeError(f"'{text}' is not a share above 0 and up to 1, such as 0.9")


def pick(args: argparse.Namespace, *names: str) -> JsonObject:
    """Return these arguments by name, to be passed on under the same names."""
    return {name: getattr(args, name) for name in names}


def add_json(parser: argparse.ArgumentParser, default: object = False) -> None:
    text = "print the result as JSON on the last line of stdout"
    parser.add_argument("--json", action="store_true", default=default, help=text)


def add_counts(parser: argparse.ArgumentParser, options: Mapping[str, tuple[int, str]]) -> None:
    """Add options of whole numbers of at least 1: option -> its default and its help."""
    for option, (default, text) in options.items():
        told = f"{text} (default: %(default)s)"
        parser.add_argument(option, type=parse_count, default=default, metavar="N", help=told)


def add_effort(add: Callable[..., object], measured: str) -> None:
    """Add the options of :class:`flexquant.evaluation.comparison.Effort`."""
    text = f"rounds of {measured} (default: by the machine); without --max-rounds, exactly these"
    add("--rounds", type=parse_count, metavar="N", help=text)
    add("--max-rounds", type=parse_count, metavar="N", help="most rounds, added ones included")
    text = "add rounds while the 95 %% interval of a ratio is wider than this (default: 3%%)"
    add("--width", type=parse_percent, metavar="X%", help=text)


def add_variants(add: Callable[..., object]) -> None:
    """Add the option of the variants that :func:`flexquant.tuning.candidates.find_variants` finds."""
    text = "comma-separated variants to choose among, or policies of one variant such as w4a8 (default: "
    text += "all variants of the checkpoint; if it has one alone, INT8 computed from it too)"
    add("--variants", type=parse_names, metavar="NAMES", help=text)


def add_dtype(parser: argparse.ArgumentParser) -> None:
    text = "cast what is in 16 bit, and scales of packed weights, to this dtype; vLLM casts what else "
    text += "is in 32 bit (default: as it is)"
    parser.add_argument("--dtype", choices=tuple(CASTS), help=text)


def add_shard_size(parser: argparse.ArgumentParser) -> None:
    text, size = "most bytes of tensors in one file (default: 5GB)", DEFAULT_SHARD_SIZE
    parser.add_argument("--max-shard-size", type=parse_size, default=size, metavar="SIZE", help=text)


def add_subject(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint that is scored, the text and the reference."""
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="merged, INT4 or 16-bit checkpoint")
    add("--text", type=Path, required=True, metavar="FILE", help="text or .jsonl file to measure on")
    add("--reference", metavar="MODEL", help="folder or Hugging Face id of the 16-bit model")


def add_rows(parser: argparse.ArgumentParser, defaults: Settings, full: str) -> None:
    """Add the options of the rows of text that are scored; ``full`` says which batch sizes they must fill."""
    options = {
        "--samples": (defaults.samples, f"rows of text, a multiple of {full} batch size"),
        "--prompt-tokens": (defaults.prompt_tokens, "tokens of a row that are prefilled"),
        "--tokens": (defaults.tokens, "tokens of a row that are forced and scored"),
    }
    add_counts(parser, options)
    text = "seed of the rows (default: %(default)s)"
    parser.add_argument("--seed", type=parse_seed, default=defaults.seed, metavar="N", help=text)


def add_study(parser: argparse.ArgumentParser, files: str) -> None:
    """Add the options of a study of layers; ``files`` names the files that are written into ``--output``."""
    add_subject(parser)
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="DIR", help=f"folder for {files}")
    add("--overwrite", action="store_true", help="discard earlier results in the output, and begin anew")
    add_variants(add)
    add_counts(parser, {"--batch-size": (STUDY_DEFAULTS.batch_sizes[0], "sequences in a decode pass")})
    add_rows(parser, STUDY_DEFAULTS, "the")


def study_of(args: argparse.Namespace, settings: Settings | None = None) -> Study:
    """Return the study of the options, or in other ``settings``; raise FlexQuantError for bad inputs."""
    from flexquant.layers.sensitivity import Study

    if settings is None:
        settings = Settings((args.batch_size,), args.samples, args.prompt_tokens, args.tokens, args.seed)
    subject = Subject(args.folder)
    variants = find_variants(subject.checkpoint.merged, args.variants)
    return Study(subject, variants, args.text, args.reference, settings)


@contextmanager
def progress_bar(title: str, unit: str = "") -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (done, total) in ``unit``, or in bytes, that shows a bar on a terminal's stderr.

    A log gets one line.
    """
    from tqdm import tqdm

    bar: tqdm | None = None

    def show(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            scale = {"unit": unit or "B", "unit_scale": not unit}
            bar = tqdm(desc=title, total=total, leave=False, disable=None, **scale)
            if bar.disable:
                tell(f"{title} ...")
        bar.total = total
        bar.update(done - bar.n)

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()


def tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def save_plot(file: Path, draw: Callable[[], Figure]) -> None:
    """Write a plot as a PNG; say on stderr why there is none, since a missing plot is no failure."""
    try:
        with staged_file(file) as partial:
            draw().savefig(partial, format="png")
    except (FlexQuantError, OSError) as e:
        print(f"no plot: {e}", file=sys.stderr)
