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
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path

from flexquant.checkpoint.model_config import JsonObject
from flexquant.cli._arguments import (
    add_counts,
    add_rows,
    add_subject,
    parse_counts,
    parse_names,
    save_plot,
    tell,
)
from flexquant.errors import UsageError
from flexquant.evaluation.inputs import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    defaults = Settings()
    add = parser.add_argument
    add_subject(parser)
    add(
        "--policies",
        type=parse_names,
        metavar="NAMES",
        help="comma-separated variants, built-in policies, policy files, 'stored' for the checkpoint's own "
        "(default: every variant, and the checkpoint's default policy)",
    )
    add(
        "--batch-sizes",
        type=parse_counts,
        default=",".join(map(str, defaults.batch_sizes)),
        metavar="LIST",
        help="sequences in a decode pass, comma-separated (default: %(default)s)",
    )
    add_rows(parser, defaults, "every")
    add_counts(parser, {"--answer-tokens": (defaults.answer_tokens, "most tokens of an answer")})
    questions = parser.add_mutually_exclusive_group()
    questions.add_argument(
        "--questions", metavar="FILE", help="questions to answer, one a line (default: 24 built-in ones)"
    )
    questions.add_argument("--no-questions", action="store_true", help="do not compare answers")
    add("--output", type=Path, metavar="DIR", help="folder for quality.json, quality.md and quality.png")


def run(args: argparse.Namespace) -> JsonObject:
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    if args.questions and not args.reference:
        raise UsageError("--questions needs --reference, whose answers the others are compared with")

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from flexquant.evaluation.evaluating import evaluate
    from flexquant.evaluation.inputs import read_questions
    from flexquant.evaluation.report import draw_quality, format_quality_table, writable_folder, write_results

    questions: list[str] | None = [] if args.no_questions else None
    if args.questions:
        questions = read_questions(args.questions)
    with writable_folder(args.output, "--output") if args.output else nullcontext():
        document = evaluate(
            args.folder,
            args.text,
            reference=args.reference,
            policies=args.policies,
            questions=questions,
            settings=settings,
            progress=tell,
        )
    print(format_quality_table(document))
    if args.output:
        write_results(document, args.output)
        save_plot(args.output / "quality.png", partial(draw_quality, document))
    return document
