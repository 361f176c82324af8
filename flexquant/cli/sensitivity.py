# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Measure what each decoder layer costs in the lower precision, and wins in the higher.

Every layer runs alone in the lower precision while all others are in the higher, and the other way round, on
one engine. Prompts are prefilled in the higher precision; their continuations are forced token by token and
decoded by the plan. The numbers are KL divergences to --reference, or without it to the higher variant.
Stopped and started again with the same arguments, it goes on.

examples:
  flexquant sensitivity model-merged --text text.txt --reference model --output results
  flexquant sensitivity model-merged --text text.txt --variants w8a8,w4a16 --samples 16 --output results
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from flexquant.cli._arguments import parse_count, parse_names
from flexquant.errors import FlexQuantError, UsageError
from flexquant.evaluation.settings import Settings

HELP = "measure what each layer costs in the lower precision"
DEFAULTS = Settings(batch_sizes=(16,), samples=32, prompt_tokens=128, tokens=32)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="OUT", help="merged checkpoint")
    parser.add_argument(
        "--text", type=Path, required=True, metavar="FILE", help="text or .jsonl file to measure on"
    )
    parser.add_argument("--reference", metavar="MODEL", help="folder or Hugging Face id of the 16-bit model")
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for sensitivity.json, sensitivity.md and sensitivity.png",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="begin anew, whatever the output holds already"
    )
    parser.add_argument(
        "--variants",
        type=parse_names,
        metavar="TWO",
        help="two variants of the checkpoint, if it has more",
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
        "--seed", type=int, default=DEFAULTS.seed, metavar="N", help="draws the rows (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    settings = Settings((args.batch_size,), args.samples, args.prompt_tokens, args.tokens, args.seed)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from flexquant.checkpoint.output import staged_file
    from flexquant.evaluation.report import writable_folder
    from flexquant.evaluation.subject import Subject
    from flexquant.sensitivity.measuring import Study
    from flexquant.sensitivity.report import format_table, save_plot
    from flexquant.tuning.candidates import find_variants

    subject = Subject.open(args.folder)
    subject.check_length(settings.row_tokens, "a prompt and its continuation")
    if args.reference is not None:
        subject.check_reference(args.reference)
    variants = list(find_variants(subject.checkpoint.merged, args.variants))
    if len(variants) != 2:
        raise UsageError(
            f"the checkpoint has {', '.join(variants)}; name the two to compare, e.g. --variants w8a8,w4a16"
        )
    higher, lower = variants
    study = Study(subject, higher, lower, args.text, args.reference, settings)
    with writable_folder(args.output, "--output") as folder:
        document = study.measure(
            folder / "sensitivity.json",
            overwrite=args.overwrite,
            progress=lambda message: print(message, file=sys.stderr, flush=True),
        )
    table = format_table(document)
    print(table)
    with staged_file(folder / "sensitivity.md") as partial:
        partial.write_text(table + "\n", encoding="utf-8")
    try:
        with staged_file(folder / "sensitivity.png") as partial:
            save_plot(document, partial)
    except FlexQuantError as e:
        print(f"no plot: {e}", file=sys.stderr)
    return document
