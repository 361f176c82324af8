# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Convert an AWQ or GPTQ checkpoint to the format of compressed-tensors, so that it can be merged.

Quantised values do not change. AWQ's GEMM format and GPTQ without desc_act are supported.

example:
  flexquant convert model-awq --output model-w4a16 --dtype bfloat16
"""

from __future__ import annotations

import argparse

from flexquant.checkpoint.model_config import JsonObject

HELP = "convert an AWQ or GPTQ checkpoint, so that it can be merged"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="AWQ or GPTQ checkpoint")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the output if it exists")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16"),
        help="cast scales and unquantised tensors to the other variants' dtype (default: do not cast)",
    )


def run(args: argparse.Namespace) -> JsonObject:
    from flexquant.merge import convert_checkpoint

    result = convert_checkpoint(args.folder, args.output, dtype=args.dtype, overwrite=args.overwrite)
    print(f"{args.output}: {result['linears']} linears, converted from {result['from']}")
    return result
