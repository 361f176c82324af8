# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Merge quantised variants of one model into one checkpoint.

Each variant is a compressed-tensors checkpoint folder such as llmcompressor writes. Tensors that are equal
in all of them are stored once. The output appears only when it has been checked and is complete.

examples:
  flexquant merge w8a8=model-w8a8 w4a16=model-w4a16 --output model-merged
  flexquant merge w8a8=model-w8a8 w4a16=model-w4a16 --output model-merged --policy phase --overwrite
"""

from __future__ import annotations

import argparse

from flexquant.checkpoint.model_config import JsonObject
from flexquant.cli._arguments import add_options, add_shard_size, parse_folders, progress_bar

HELP = "merge quantised variants of one model into one checkpoint"


def configure(parser: argparse.ArgumentParser) -> None:
    options = {
        "variants NAME=DIR": "a variant's name and its checkpoint",
        "--output DIR": "folder to write",
        "--policy NAME|FILE": "policy to store as the default, a built-in name or a YAML file (default: "
        "none; serving then uses its built-in default)",
        "--overwrite": "replace the output if it exists",
        "--allow-incompatible-kv": "merge even though the variants' KV caches are not interchangeable (for "
        "experiments)",
    }
    add_options(parser.add_argument, options, variants={"nargs": "+"}, output={"required": True})
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
            overwrite=args.overwrite,
            allow_incompatible_kv=args.allow_incompatible_kv,
            max_shard_size=args.max_shard_size,
            progress=progress,
            kv_progress=kv_progress,
        )
    print(f"{args.output}: {format_checkpoint_report(report)}")
    return {"output": args.output, **report.to_json()}
