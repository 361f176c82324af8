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
from flexquant.cli._arguments import add_options

HELP = "convert an AWQ or GPTQ checkpoint, so that it can be merged"


def configure(parser: argparse.ArgumentParser) -> None:
    options = {
        "folder DIR": "AWQ or GPTQ checkpoint",
        "--output DIR": "folder to write",
        "--overwrite": "replace the output if it exists",
        "--dtype": "cast scales and unquantised tensors to the other variants' dtype (default: do not cast)",
    }
    dtypes = {"action": "store", "choices": ("bfloat16", "float16")}
    add_options(parser.add_argument, options, output={"required": True}, dtype=dtypes)


def run(args: argparse.Namespace) -> JsonObject:
    from flexquant.merge import convert_checkpoint

    result = convert_checkpoint(args.folder, args.output, dtype=args.dtype, overwrite=args.overwrite)
    print(f"{args.output}: {result['linears']} linears, converted from {result['from']}")
    return result
