# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Check every tensor of a merged checkpoint against its recorded hash, or against its sources.

examples:
  flexquant verify model-merged
  flexquant verify model-merged --against w8a8=model-w8a8 w4a16=model-w4a16
"""

from __future__ import annotations

import argparse

from flexquant.checkpoint.model_config import JsonObject
from flexquant.cli._arguments import parse_folders, progress_bar

HELP = "check a merged checkpoint against its hashes or its sources"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="merged checkpoint")
    parser.add_argument(
        "--against",
        nargs="+",
        default=[],
        metavar="NAME=DIR",
        help="compare bit by bit with these sources instead of the recorded hashes",
    )


def run(args: argparse.Namespace) -> JsonObject:
    from flexquant.merge import verify_checkpoint

    against = parse_folders(args.against)
    with progress_bar("verifying") as progress:
        result = verify_checkpoint(args.folder, against, progress)
    for measure, count in result["tensors_compared_with"].items():
        print(f"{args.folder}: {count} tensors equal to {measure}")
    return result
