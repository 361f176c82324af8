# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Convert a checkpoint to the format of compressed-tensors. 'flexquant merge' reads the other formats too.

Quantised values do not change. AWQ (GEMM), GPTQ without desc_act, block FP8, AutoRound's exports in these
formats and Quark's INT8 are read.

example:
  flexquant convert model-awq --output model-w4a16 --dtype bfloat16
"""

from __future__ import annotations

import argparse

from flexquant.checkpoint.model_config import JsonObject
from flexquant.cli._arguments import add_dtype, progress_bar

HELP = "convert an AWQ, GPTQ, AutoRound, block FP8 or Quark checkpoint to compressed-tensors"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="checkpoint of another format")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the output if it exists")
    add_dtype(parser)


def run(args: argparse.Namespace) -> JsonObject:
    from flexquant.merge import convert_checkpoint

    with progress_bar("converting") as progress:
        result = convert_checkpoint(
            args.folder, args.output, dtype=args.dtype, overwrite=args.overwrite, progress=progress
        )
    print(f"{args.output}: {result['linears']} linears, converted from {result['from']}")
    return result
