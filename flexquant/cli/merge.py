# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Merge quantised variants of one model into one checkpoint.

Each variant is a checkpoint folder: of compressed-tensors, such as llmcompressor writes, of AWQ, GPTQ or
AutoRound, of Quark in INT8, in block FP8 or in 16 bit. Tensors that are equal in all of them are stored
once. The output appears only when it has been checked and is complete.

examples:
  flexquant merge w8a8=model-w8a8 w4a16=model-w4a16 --output model-merged
  flexquant merge w8a8=model-w8a8 w4a16=model-w4a16 --output model-merged --policy phase --overwrite
"""

from __future__ import annotations

import argparse

from flexquant.checkpoint.model_config import JsonObject
from flexquant.cli._arguments import add_dtype, add_shard_size, parse_folders, progress_bar

HELP = "merge quantised variants of one model into one checkpoint"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("variants", nargs="+", metavar="NAME=DIR", help="a variant's name and its checkpoint")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--policy",
        metavar="NAME|FILE",
        help="policy to store as the default, a built-in name or a YAML file (default: none; serving then "
        "uses its built-in default)",
    )
    for what, part in (
        ("config", "config"),
        ("tokenizer", "tokenizer and chat template"),
        ("generation", "generation settings"),
        ("processor", "processor of images"),
    ):
        parser.add_argument(
            f"--{what}-from",
            metavar="NAME",
            help=f"variant whose {part} the merged model gets (default: they must not differ)",
        )
    add_dtype(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace the output if it exists")
    parser.add_argument(
        "--allow-incompatible-kv",
        action="store_true",
        help="merge even though the variants' KV caches are not interchangeable (for experiments)",
    )
    add_shard_size(parser)


def run(args: argparse.Namespace) -> JsonObject:
    from flexquant.cli.inspect import format_checkpoint_report
    from flexquant.merge import merge_checkpoints

    folders = parse_folders(args.variants)
    comparing = progress_bar("comparing the KV caches", unit=" layers")
    with comparing as kv_progress, progress_bar("merging") as progress:
        report = merge_checkpoints(
            folders,
            args.output,
            policy=args.policy,
            config_from=args.config_from,
            tokenizer_from=args.tokenizer_from,
            generation_from=args.generation_from,
            processor_from=args.processor_from,
            dtype=args.dtype,
            overwrite=args.overwrite,
            allow_incompatible_kv=args.allow_incompatible_kv,
            max_shard_size=args.max_shard_size,
            progress=progress,
            kv_progress=kv_progress,
        )
    print(f"{args.output}: {format_checkpoint_report(report)}")
    return {"output": args.output, **report.to_json()}
