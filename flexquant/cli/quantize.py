# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The commands that quantise a 16-bit model: quantize, and build, which also merges."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TextIO, get_args

from tqdm import tqdm

from flexquant.checkpoint.measured_loss import MAX_LOSS, PROMPT_TOKENS, LossByKind, dump_losses, loss_lines
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.weight_bytes import format_bytes, format_report
from flexquant.cli._arguments import add_shard_size, parse_names, parse_number, parse_seed, pick
from flexquant.documents.yaml_document import builtin_names
from flexquant.policy.schema import Head
from flexquant.quantization.quantizing import STAGES_BEFORE_VARIANTS, quantize_variants
from flexquant.quantization.recipe import DEFAULT_RECIPE, PACKAGE, UNROTATED, Recipe, load_recipe
from flexquant.quantization.report import QuantizedVariant


def configure_quantize(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or Hugging Face id of the 16-bit model")
    add("--output", required=True, metavar="DIR", help="folder to write the variants into")
    _add_recipe(parser)
    text = "comma-separated variants of the recipe to make (default: all)"
    add("--variants", type=parse_names, metavar="NAMES", help=text)
    add("--overwrite", action="store_true", help="replace variants that exist")
    add("--resume", action="store_true", help="keep variants that an interrupted, equal run has finished")


def configure_build(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or Hugging Face id of the 16-bit model")
    add("--output", required=True, metavar="DIR", help="merged checkpoint to write")
    add("--variants-folder", metavar="DIR", help="where the variants stay (default: DIR-variants)")
    add("--policy", metavar="NAME|FILE", help="policy to store as the default (default: the recipe's)")
    text = "round W8A8 to within 4 bits of what INT4 predicts, store these bits, and measure the loss "
    text += f"(default recipe: {UNROTATED})"
    add("--nested", action="store_true", help=text)
    add("--overwrite", action="store_true", help="replace existing folders that other inputs made")
    _add_recipe(parser)
    add_shard_size(parser)


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = f"how each variant is made: {', '.join(builtin_names(PACKAGE))}, or a YAML file (default: "
    text += f"{DEFAULT_RECIPE})"
    add("--recipe", metavar="NAME|FILE", help=text)
    text = "text or .jsonl file, folder of them, dataset id, or 'self': text of which the model writes "
    text += "half (default: the recipe's; built-in recipes: self)"
    add("--calibration", metavar="FILE|DIR|DATASET|self", help=text)
    text = "store all variants' lm_head in INT8, or as it is (default: the recipe's)"
    add("--head", choices=get_args(Head), help=text)
    add("--samples", type=int, metavar="N", help="calibration samples (default: the recipe's)")
    add("--length", type=int, metavar="N", help="tokens in a sample (default: the recipe's)")
    add("--seed", type=parse_seed, metavar="N", help="seed of the samples (default: the recipe's)")
    text = "growth of the perplexity (or 100 times the KL divergence), on any kind of text, above which a "
    text += f"variant is said to lose too much (default: {100 * MAX_LOSS:g})"
    add("--max-loss", type=parse_number, default=100 * MAX_LOSS, metavar="PERCENT", help=text)
    text = "also show the progress bars, logs and warnings of llmcompressor"
    add("--verbose", action="store_true", help=text)


def _read_recipe(args: argparse.Namespace, default: str) -> Recipe:
    return load_recipe(default if args.recipe is None else args.recipe).with_head(args.head)


def quantize(args: argparse.Namespace) -> JsonObject:
    """Quantise a 16-bit model into one folder per variant, by a recipe: DIR/w8a8, DIR/w4a16.

    This needs llmcompressor (pip install "flexquant[quantize]"), in an environment without vLLM. MODEL is a
    folder or a Hugging Face id. A recipe is a built-in one (see --recipe) or a YAML file that names
    llmcompressor's modifiers for each variant. Calibrate on text like your users': a text file, a .jsonl file
    whose records have 'text' or 'messages', a folder of such files, or a Hugging Face dataset id. Without
    --calibration, built-in recipes have the model write half of the text, and keep it as
    DIR/calibration.jsonl, which another run with --resume reuses.

    examples:
      flexquant quantize path/to/model --output variants --calibration chats.jsonl --samples 256 --length 1024
      flexquant quantize path/to/model --output variants --recipe my-recipe.yaml --variants w4a16 --resume
    """
    recipe = _read_recipe(args, DEFAULT_RECIPE)
    wanted = recipe.variants if args.variants is None else set(args.variants)
    how = {**_how(args, STAGES_BEFORE_VARIANTS + len(wanted)), **pick(args, "variants", "resume")}
    with redirect_stdout(sys.stderr):  # llmcompressor prints
        variants = quantize_variants(args.model, args.output, recipe, **how)
    _print_variants(variants, args.max_loss)
    return {"output": args.output, "variants": {v.name: v.model_dump() for v in variants}}


def build(args: argparse.Namespace) -> JsonObject:
    """Build a merged checkpoint from a 16-bit model: quantise by a recipe, compare KV caches, merge, verify.

    This needs llmcompressor, like `flexquant quantize`, and takes its recipes and calibration options. An
    interrupted build resumes when it is started again. The variants stay in a folder beside the output.

    example:
      flexquant build path/to/model --output model-merged --recipe fp8 --samples 256 --length 1024
    """
    from flexquant.build import STAGES_AFTER_QUANTISING, build_checkpoint

    if args.nested and args.recipe is None:
        print(f"--nested takes the recipe '{UNROTATED}': rotated weights cannot be nested", file=sys.stderr)
    recipe = _read_recipe(args, UNROTATED if args.nested else DEFAULT_RECIPE)
    stages = STAGES_BEFORE_VARIANTS + len(recipe.variants) + STAGES_AFTER_QUANTISING
    how = _how(args, stages) | pick(args, "variants_folder", "policy", "nested", "max_shard_size")
    with redirect_stdout(sys.stderr):  # llmcompressor prints
        built = build_checkpoint(args.model, args.output, recipe, **how)
    _print_variants(built.variants, args.max_loss, built.nested_losses)
    on = f"answers to prompts of {PROMPT_TOKENS} tokens, as served,"
    for line in loss_lines(built.answer_losses, args.max_loss / 100, on):
        print(line)
    print(f"{args.output}: {format_report(built.report)}")
    report = built.report.to_json()
    return {
        "output": args.output,
        **report,
        "variants": {v.name: {**report["variants"][v.name], **v.model_dump()} for v in built.variants},
        "tensors_compared_with": built.tensors_compared,
        "nested_losses": dump_losses(built.nested_losses),
        "answer_losses": dump_losses(built.answer_losses),
    }


def _how(args: argparse.Namespace, number_of_stages: int) -> JsonObject:
    """Return the keyword arguments that ``quantize_variants`` and ``build_checkpoint`` have in common."""
    stages = Stages(number_of_stages)
    shared = pick(args, "calibration", "samples", "length", "seed", "overwrite", "verbose")
    return {**shared, "progress": stages.note, "stage": stages.stage}


def _print_variants(
    variants: Sequence[QuantizedVariant], max_loss: float, nested: Mapping[str, LossByKind] | None = None
) -> None:
    """Print each variant, and what all lost, nested or not; above ``max_loss`` percent is too much."""
    for v in variants:
        took = "kept from an earlier run" if v.kept else f"{v.seconds:.0f} s"
        group = f", groups of {v.group_size}" if v.group_size else ""
        smoothed = f", {v.smoothed} groups of linears smoothed" if v.smoothed else ""
        print(f"{v.name}: {v.folder}, {format_bytes(v.num_bytes)}, {took}{group}{smoothed}")
        if v.mse_gain is not None:
            gain = f"quantisation MSE {v.mse_gain:.2g}x below one alpha 0.5"
            print(f"{v.name}: alpha searched per layer: {gain}")
    losses = {v.name: v.losses for v in variants if v.losses}
    losses |= {f"{name} nested": of_variant for name, of_variant in (nested or {}).items()}
    for line in loss_lines(losses, max_loss / 100):
        print(line)


class Stages:
    """Prints a command's stages, ``[2/5] w8a8: ...``, on stderr, and on a terminal the progress of one."""

    def __init__(self, total: int) -> None:
        self._stream: TextIO = sys.stderr
        self._total = total
        self._begun = 0

    def note(self, message: str) -> None:
        tqdm.write(message, file=self._stream)
        self._stream.flush()

    @contextmanager
    def stage(self, title: str, *, unit: str = "") -> Iterator[Callable[[int, int], None]]:
        """Begin the next stage; yield a function of (done, total), counted in ``unit`` or as a percentage."""
        self._begun += 1
        line = f"[{self._begun}/{self._total}] {title} ..."
        self.note(line)
        started = time.monotonic()
        form = f"{{n_fmt}} of {{total_fmt}}{unit}" if unit else "{percentage:.0f}%"
        form = f"{{desc}} {form}, {{elapsed}}"
        with tqdm(desc=line, bar_format=form, file=self._stream, disable=None, leave=False) as bar:

            def show(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            yield show
        seconds = time.monotonic() - started
        self.note(f"{line} {seconds:.{0 if seconds >= 10 else 1}f} s")
