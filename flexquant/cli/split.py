# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Write one variant of a merged checkpoint as a plain checkpoint, which any vLLM loads.

Keys, config and recipe are those of the source, and the tensors are bit-identical.

example:
  flexquant split model-merged --variant w4a16 --output model-w4a16
"""

from __future__ import annotations

import argparse

from flexquant.checkpoint.model_config import JsonObject
from flexquant.cli._arguments import add_shard_size, progress_bar

HELP = "write one variant of a merged checkpoint as a plain checkpoint"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="merged checkpoint")
    parser.add_argument("--variant", required=True, metavar="NAME", help="variant to write")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the output if it exists")
    add_shard_size(parser)


def run(args: argparse.Namespace) -> JsonObject:
    from flexquant.checkpoint.weight_bytes import format_bytes
    from flexquant.merge import split_checkpoint

    with progress_bar("splitting") as progress:
        result = split_checkpoint(
            args.folder,
            args.variant,
            args.output,
            overwrite=args.overwrite,
            max_shard_size=args.max_shard_size,
            progress=progress,
        )
    print(f"{args.output}: {result['tensors']} tensors of '{args.variant}', {format_bytes(result['bytes'])}")
    return result
