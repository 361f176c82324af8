# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Build a merged checkpoint from a 16-bit model: quantise by a recipe, compare KV caches, merge, verify.

This needs llmcompressor, like `flexquant quantize`, and takes its recipes and calibration options. An
interrupted build resumes when it is started again. The variants stay in a folder beside the output.

examples:
  flexquant build Qwen/Qwen2.5-7B-Instruct --output qwen-merged --calibration HuggingFaceH4/ultrachat_200k
  flexquant build path/to/model --output model-merged --recipe fp8 --samples 256 --length 1024
"""

from __future__ import annotations

import argparse

from flexquant.checkpoint.model_config import JsonObject
from flexquant.cli._arguments import add_shard_size
from flexquant.cli._stages import Stages
from flexquant.cli.quantize import (
    add_recipe_options,
    calibration_options,
    only_summary_on_stdout,
    print_variants,
)

HELP = "quantise a 16-bit model and merge its variants, in one go"


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or Hugging Face id of the 16-bit model")
    add("--output", required=True, metavar="DIR", help="merged checkpoint to write")
    add("--variants-folder", metavar="DIR", help="where the variants stay (default: DIR-variants)")
    add("--policy", metavar="NAME|FILE", help="policy to store as the default (default: the recipe's)")
    add("--overwrite", action="store_true", help="replace existing folders that other inputs made")
    add_recipe_options(parser)
    add_shard_size(parser)


def run(args: argparse.Namespace) -> JsonObject:
    from flexquant.build import STAGES_AFTER_QUANTISING, build_checkpoint
    from flexquant.cli.inspect import format_checkpoint_report
    from flexquant.quantization.quantizing import STAGES_BEFORE_VARIANTS
    from flexquant.quantization.recipe import load_recipe

    recipe = load_recipe(args.recipe)
    stages = Stages(STAGES_BEFORE_VARIANTS + len(recipe.variants) + STAGES_AFTER_QUANTISING)
    with only_summary_on_stdout():
        built = build_checkpoint(
            args.model,
            args.output,
            recipe,
            variants_folder=args.variants_folder,
            policy=args.policy,
            overwrite=args.overwrite,
            max_shard_size=args.max_shard_size,
            progress=stages.note,
            stage=stages.stage,
            verbose=args.verbose,
            **calibration_options(args),
        )
    print_variants(built.variants, args.max_loss)
    print(f"{args.output}: {format_checkpoint_report(built.report)}")
    return {
        "output": args.output,
        "variants": {v.name: v.model_dump() for v in built.variants},
        "tensors_compared_with": built.tensors_compared,
        **built.report.to_json(),
    }
