# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What do whole answers lose under each policy? Greedy answers to tasks that this benchmark makes itself.

    python -m benchmarks.generation MERGED --reference MODEL --policies w8a8,w4a16,phase-batch --output FILE

The tasks are arithmetic worked out in steps (right if the last number is), instructions on the form of an
answer (all checked exactly), and open questions with long answers. For the last, the results say where an
answer first differs from the 16-bit model's and from the first policy's. Shares have Wilson's interval;
differences between policies are paired, since all answer the same tasks. The 16-bit model answers twice, the
second time in batches of half the size: what changes then is rounding. A model without a chat template gets
the questions as plain text.

A decode pass holds at most --batch-size sequences. Keep it within the policy's limit (32 for phase-batch), so
that W4A16 decodes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.generation.answering import KINDS, Answers, Settings, answer_all
from benchmarks.generation.results import results_of, table
from benchmarks.generation.task import text_of
from benchmarks.result import origin, write_result
from flexquant.checkpoint.merged_checkpoint import folder_label
from flexquant.checkpoint.output import staged_file
from flexquant.cli._arguments import parse_count, parse_names
from flexquant.errors import FlexQuantError
from flexquant.evaluation.inputs import Subject
from flexquant.evaluation.report import writable_folder

SCHEMA = "flexquant.generation/v1"


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the document of results; raise FlexQuantError for what cannot be measured."""
    tokens = dict.fromkeys(KINDS, args.answer_tokens) | {"long": args.long_tokens}
    settings = Settings({kind: getattr(args, kind) for kind in KINDS}, tokens, args.batch_size, args.seed)
    subject = Subject(args.model)
    answers = answer_all(
        subject, args.reference, args.policies, settings, lambda name: print(f"{name} ...", flush=True)
    )
    if args.answers:
        write_answers(answers, subject.tokenizer, args.answers)
    return {
        "schema": SCHEMA,
        **origin("benchmarks.generation"),
        "checkpoint": folder_label(subject.folder),
        "reference": Path(args.reference).name,
        "prompts": "chat template" if subject.tokenizer.chat_template else "plain text",
        "settings": asdict(settings),
        "results": results_of(answers, tokens, subject.tokenizer),
    }


def write_answers(answers: Answers, tokenizer: Any, file: Path) -> None:
    """Write a line of JSON for every task, with all answers to it."""
    with staged_file(file) as partial, partial.open("w", encoding="utf-8") as lines:
        for kind, tasks in answers.tasks.items():
            for number, task in enumerate(tasks):
                told = {n: text_of(found[kind][number], tokenizer) for n, found in answers.by_policy.items()}
                line = {"kind": kind, "family": task.family, "question": task.question, "answers": told}
                lines.write(json.dumps(line, ensure_ascii=False) + "\n")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.generation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="merged checkpoint")
    parser.add_argument("--reference", required=True, help="folder or Hugging Face id of the 16-bit model")
    parser.add_argument(
        "--policies",
        type=parse_names,
        default="w8a8,w4a16,phase-batch",
        help="names and files, comma-separated (%(default)s)",
    )
    numbers = {
        "arithmetic": (100, "tasks"),
        "instructions": (60, "tasks"),
        "long": (16, "open questions"),
        "answer_tokens": (128, "most tokens of an answer that is checked"),
        "long_tokens": (256, "most tokens of a long answer"),
        "batch_size": (16, "prompts answered at once"),
    }
    for name, (default, text) in numbers.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=parse_count,
            default=default,
            metavar="N",
            help=f"{text} (%(default)s)",
        )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="makes the tasks (%(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--answers", type=Path, help="JSONL file for all answers, to be read by people")
    args = parser.parse_args(arguments)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        with writable_folder(args.output.parent, "--output"):
            document = measure(args)
            with staged_file(args.output) as partial:
                write_result(partial, document)
    except FlexQuantError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(f"\n{table(document)}\n\nwrote {args.output}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
