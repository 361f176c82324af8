# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Measure what each policy of a merged checkpoint costs in quality, as vLLM serves it.

Rows are drawn from a text. Each row's prompt is prefilled and its continuation forced token by token, so
decode passes are measured as they are served, over the shared KV cache. With --reference, the 16-bit model
that the variants were made from, the results are KL divergence, agreement and identical answers; without it,
perplexity. Meanwhile TMPDIR holds the reference's log-probabilities: 4 bytes x samples x tokens x vocabulary.

examples:
  flexquant eval model-merged --text text.txt --reference model --output results
  flexquant eval model-merged --text chats.jsonl --policies w8a8,phase,my-policy.yaml --batch-sizes 8
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from flexquant.checkpoint.model_config import JsonObject
from flexquant.cli._arguments import add_options, set_defaults, tell
from flexquant.errors import FlexQuantError, UsageError
from flexquant.evaluation.inputs import Settings

HELP = "measure what each policy costs in quality, through vLLM"


def configure(parser: argparse.ArgumentParser) -> None:
    options = {
        "folder OUT": "merged checkpoint",
        "--text FILE": "text or .jsonl file to measure on",
        "--reference MODEL": "folder or Hugging Face id of the 16-bit model",
        "--policies NAMES": "comma-separated variants, built-in policies, policy files, 'stored' for the "
        "checkpoint's own (default: every variant, and the checkpoint's default policy)",
        "--batch-sizes LIST": "sequences in a decode pass, comma-separated (default: %(default)s)",
        "--samples N": "rows of text, a multiple of every batch size (default: %(default)s)",
        "--prompt-tokens N": "tokens of a row that are prefilled (default: %(default)s)",
        "--tokens N": "tokens of a row that are forced and scored (default: %(default)s)",
        "--seed N": "seed of the rows (default: %(default)s)",
        "--answer-tokens N": "most tokens of an answer (default: %(default)s)",
    }
    defaults = Settings()
    sizes = {"default": ",".join(map(str, defaults.batch_sizes))}
    add_options(parser.add_argument, options, text={"required": True}, batch_sizes=sizes, seed={"type": int})
    set_defaults(parser, defaults, "samples", "prompt_tokens", "tokens", "seed", "answer_tokens")
    questions = {
        "--questions FILE": "questions to answer, one a line (default: 24 built-in ones)",
        "--no-questions": "do not compare answers",
    }
    add_options(parser.add_mutually_exclusive_group().add_argument, questions)
    files = {
        "--output DIR": "folder for quality.json, quality.md and quality.png",
        "--plot FILE": "another place for the plot, .png or .svg",
    }
    add_options(parser.add_argument, files)


def run(args: argparse.Namespace) -> JsonObject:
    settings = Settings(
        batch_sizes=args.batch_sizes,
        samples=args.samples,
        prompt_tokens=args.prompt_tokens,
        tokens=args.tokens,
        seed=args.seed,
        answer_tokens=args.answer_tokens,
    )
    if args.questions and not args.reference:
        raise UsageError("--questions needs --reference, whose answers the others are compared with")

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from flexquant.evaluation.evaluating import evaluate
    from flexquant.evaluation.inputs import read_questions
    from flexquant.evaluation.report import (
        format_quality_table,
        save_quality_plot,
        writable_folder,
        write_results,
    )

    questions: list[str] | None = read_questions(args.questions) if args.questions else None
    with ExitStack() as outputs:
        if args.output:
            outputs.enter_context(writable_folder(args.output, "--output"))
        if args.plot:
            outputs.enter_context(writable_folder(Path(args.plot).parent, "--plot"))
        document = evaluate(
            args.folder,
            args.text,
            reference=args.reference,
            policies=args.policies,
            questions=[] if args.no_questions else questions,
            settings=settings,
            progress=tell,
        )
    print(format_quality_table(document))
    plots = [Path(args.plot)] if args.plot else []
    if args.output:
        write_results(document, args.output)
        plots.append(Path(args.output, "quality.png"))
    if plots:
        try:
            save_quality_plot(document, plots)
        except FlexQuantError as e:  # a missing plot must not discard numbers that took minutes or hours
            print(f"flexquant eval: no plot: {e}", file=sys.stderr)
    return document
