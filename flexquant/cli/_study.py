# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Define the options of a study of layers, which `sensitivity` and `search` share."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flexquant.cli._arguments import parse_count, parse_names
from flexquant.evaluation.settings import Settings

if TYPE_CHECKING:
    from flexquant.layers.sensitivity import Study

DEFAULTS = Settings(batch_sizes=(16,), samples=32, prompt_tokens=128, tokens=32)


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
