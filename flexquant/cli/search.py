# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Choose a precision for each layer in decode, under a budget of quality, time or layers.

First each layer's cost alone is measured, as by 'flexquant sensitivity' and in the same file. Then one layer
after another is raised from the lowest precision, the one that gains most for its time first, and such plans
are measured whole, since the layers' gains do not add up. Times come from --policy, which 'flexquant tune'
wrote. The policy that is written equals it, with the chosen plan in the rule that decodes --sequences
sequences.

examples:
  flexquant search out --text text.txt --reference model --policy tuned.yaml --output results --max-kl 0.05
  flexquant search out --text text.txt --policy tuned.yaml --output results --layers 8
"""

from __future__ import annotations

import argparse
import os
from functools import partial

from flexquant.checkpoint.model_config import JsonObject
from flexquant.cli._arguments import (
    add_counts,
    add_study,
    parse_count,
    parse_number,
    save_plot,
    study_of,
    tell,
)
from flexquant.errors import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    add_study(parser, "searched.yaml, searched.md and searched.png, beside sensitivity.json")
    parser.add_argument(
        "--policy",
        metavar="POLICY",
        help="policy with measured times, from 'flexquant tune' (default: the one stored in the checkpoint)",
    )
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--max-kl", type=parse_number, metavar="X", help="most KL divergence, nats a token")
    budget.add_argument(
        "--max-slowdown",
        type=parse_number,
        metavar="X",
        help="e.g. 0.1: 10 %% slower than the fastest variant",
    )
    budget.add_argument("--layers", type=parse_count, metavar="N", help="number of layers to raise")
    sequences = (
        "sequences in the decode pass whose time counts; passes with --batch-size sequences are scored"
    )
    add_counts(parser, {"--sequences": (1, sequences)})


def run(args: argparse.Namespace) -> JsonObject:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from flexquant.checkpoint.output import write_text
    from flexquant.evaluation.report import writable_folder
    from flexquant.layers.report import (
        draw_search,
        format_search_table,
        policy_text,
        searched_policy_document,
    )
    from flexquant.layers.searching import Budget, Search
    from flexquant.policy.plans import describe_layers
    from flexquant.policy.rules import find_measured

    budget = Budget(args.max_kl, args.max_slowdown, args.layers)
    study = study_of(args)
    measured = find_measured(args.policy, study.subject.checkpoint.merged.policy)
    if measured is None:
        raise UsageError(f"{args.folder} stores no measured times; give a tuned policy as --policy")
    times, base = measured
    search = Search(study, times, budget, args.sequences)
    with writable_folder(args.output, "--output") as folder:
        found = search.run(folder / "sensitivity.json", overwrite=args.overwrite, progress=tell)
    document = searched_policy_document(base, found, dict(study.variants), budget, args.sequences)
    table = format_search_table(found)
    print(table)
    for name, text in (("searched.yaml", policy_text(document, found)), ("searched.md", table + "\n")):
        write_text(folder / name, text)
    print(f"chosen: {describe_layers(found.chosen.layers)}; wrote {folder / 'searched.yaml'}")
    save_plot(folder / "searched.png", partial(draw_search, found))
    return document
