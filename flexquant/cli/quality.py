# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The commands that measure quality: eval of policies, sensitivity of single layers, search of a plan."""

import argparse
import os
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path

import flexquant.cli._arguments as options
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.output import write_text
from flexquant.errors import UsageError
from flexquant.evaluation.inputs import Settings, read_questions
from flexquant.evaluation.report import draw_quality, format_quality_table, writable_folder, write_results
from flexquant.policy.plans import describe_layers
from flexquant.policy.rules import choose_policy


def configure_eval(parser: argparse.ArgumentParser) -> None:
    defaults = Settings()
    add = parser.add_argument
    options.add_subject(parser)
    text = "comma-separated variants, built-in policies, policy files, 'stored' for the checkpoint's own "
    text += "(default: every variant, and the checkpoint's default policy)"
    add("--policies", type=options.parse_names, metavar="NAMES", help=text)
    sizes = ",".join(map(str, defaults.batch_sizes))
    text = "sequences in a decode pass, comma-separated (default: %(default)s)"
    add("--batch-sizes", type=options.parse_counts, default=sizes, metavar="LIST", help=text)
    options.add_rows(parser, defaults, "every")
    options.add_counts(parser, {"--answer-tokens": (defaults.answer_tokens, "most tokens of an answer")})
    questions = parser.add_mutually_exclusive_group()
    text = "questions to answer, one a line (default: 24 built-in ones)"
    questions.add_argument("--questions", metavar="FILE", help=text)
    questions.add_argument("--no-questions", action="store_true", help="do not compare answers")
    add("--output", type=Path, metavar="DIR", help="folder for quality.json, quality.md and quality.png")


def eval_policies(args: argparse.Namespace) -> JsonObject:
    """Measure what each policy of a checkpoint costs in quality, as vLLM serves it.

    Rows are drawn from a text. Each row's prompt is prefilled and its continuation forced token by token, so
    decode passes are measured as they are served, over the shared KV cache. With --reference, the 16-bit
    model that the variants were made from, the results are KL divergence, agreement and identical answers;
    without it, perplexity. Meanwhile TMPDIR holds the reference's log-probabilities: 4 bytes x samples x
    tokens x vocabulary.

    examples:
      flexquant eval model-merged --text text.txt --reference model --output results
      flexquant eval model-merged --text chats.jsonl --policies w8a8,phase,my-policy.yaml --batch-sizes 8
    """
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    if args.questions and not args.reference:
        raise UsageError("--questions needs --reference, whose answers the others are compared with")

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from flexquant.evaluation.evaluating import evaluate

    questions: list[str] | None = [] if args.no_questions else None
    if args.questions:
        questions = read_questions(args.questions)
    with writable_folder(args.output, "--output") if args.output else nullcontext():
        how = options.pick(args, "reference", "policies") | {"questions": questions, "settings": settings}
        document = evaluate(args.folder, args.text, progress=options.tell, **how)
    print(format_quality_table(document))
    if args.output:
        write_results(document, args.output)
        options.save_plot(args.output / "quality.png", partial(draw_quality, document))
    return {**document}


def configure_sensitivity(parser: argparse.ArgumentParser) -> None:
    options.add_study(parser, "sensitivity.json, sensitivity.md and sensitivity.png")


def sensitivity(args: argparse.Namespace) -> JsonObject:
    """Measure what each decoder layer costs in a lower precision, and gains in a higher one.

    Every layer runs alone in a lower precision while all others are in the highest, and alone in a higher one
    while all others are in the lowest, on one engine. Prompts are prefilled in the highest precision; their
    continuations are forced token by token and decoded by the plan. The results are KL divergences to
    --reference, or without it to the most precise variant. An interrupted run resumes if it is started again
    with the same arguments. 'flexquant search' makes a policy from the results.

    example:
      flexquant sensitivity model-merged --text text.txt --variants w8a8,w4a16 --samples 16 --output results
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from flexquant.layers.report import draw_sensitivity, format_sensitivity_table

    study = options.study_of(args)
    with writable_folder(args.output, "--output") as folder:
        document = study.measure(folder / "sensitivity.json", overwrite=args.overwrite, progress=options.tell)
    print(table := format_sensitivity_table(document))
    write_text(folder / "sensitivity.md", table + "\n")
    options.save_plot(folder / "sensitivity.png", partial(draw_sensitivity, document))
    return {**document}


def configure_search(parser: argparse.ArgumentParser) -> None:
    options.add_study(parser, "searched.yaml, searched.md and searched.png, beside sensitivity.json")
    text = "policy with measured times, from 'flexquant tune' (default: the one stored in the checkpoint)"
    parser.add_argument("--policy", metavar="POLICY", help=text)
    budget = parser.add_mutually_exclusive_group(required=True)
    text = "most KL divergence, nats a token"
    budget.add_argument("--max-kl", type=options.parse_number, metavar="X", help=text)
    text = "e.g. 0.1: 10 %% slower than the fastest variant"
    budget.add_argument("--max-slowdown", type=options.parse_number, metavar="X", help=text)
    budget.add_argument("--layers", type=options.parse_count, metavar="N", help="number of layers to raise")
    sequences = "sequences in the decode pass whose time counts; passes with --batch-size ones are scored"
    options.add_counts(parser, {"--sequences": (1, sequences)})


def search(args: argparse.Namespace) -> JsonObject:
    """Choose a precision for each layer in decode, under a budget of quality, time or layers.

    First each layer's cost alone is measured, as by 'flexquant sensitivity' and in the same file. Then one
    layer after another is raised from the lowest precision, the one that gains most for its time first, and
    such plans are measured whole, since the layers' gains do not add up. Times come from --policy, which
    'flexquant tune' wrote. The policy that is written equals it, with the chosen plan in the rule that
    decodes --sequences sequences.

    examples:
      flexquant search merged --text a.txt --reference model --policy tuned.yaml --output found --max-kl 0.05
      flexquant search merged --text a.txt --policy tuned.yaml --output found --layers 8
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from flexquant.layers import report
    from flexquant.layers.searching import Budget, Search

    budget = Budget(args.max_kl, args.max_slowdown, args.layers)
    study = options.study_of(args)
    base = choose_policy(args.policy, study.subject.checkpoint.merged.policy)
    if base.measured is None:
        problem = f"the policy '{base.name}' has no measured times (key 'measured')"
        raise UsageError(f"{problem}; give as --policy one that 'flexquant tune' wrote")
    searching = Search(study, base.measured, budget, args.sequences)
    with writable_folder(args.output, "--output") as folder:
        found = searching.run(folder / "sensitivity.json", overwrite=args.overwrite, progress=options.tell)
    document = report.searched_policy_document(base, found, dict(study.variants), budget, args.sequences)
    print(table := report.format_search_table(found))
    for name, text in (("searched.yaml", report.policy_text(document, found)), ("searched.md", table + "\n")):
        write_text(folder / name, text)
    print(f"chosen: {describe_layers(found.chosen.layers)}; wrote {folder / 'searched.yaml'}")
    options.save_plot(folder / "searched.png", partial(report.draw_search, found))
    return document
