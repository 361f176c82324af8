# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Fit a merged checkpoint with INT4 weights into a memory: measure, and write the policy that follows.

All layers have INT4 weights. As many layers as fit have W8A8 of their own, and the others compute INT8
weights from INT4 in each pass. That plan is measured like a variant, as by 'flexquant tune', and the fastest
of what fits together becomes the policy. It holds a table of the choices.

examples:
  flexquant fit model-merged --output fitting.yaml --memory 20GiB --sensitivity sensitivity.json
  flexquant fit model-merged --output fitting.yaml --kv-tokens 60000
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from flexquant.checkpoint.model_config import JsonObject
from flexquant.cli._arguments import parse_count, parse_size, tell
from flexquant.cli.tune import add_goal, add_measuring, measure, read_goal, write
from flexquant.errors import UsageError

if TYPE_CHECKING:
    from flexquant.layers.memory_fit import Fit

HELP = "fit a merged checkpoint into a memory: how many layers have W8A8 beside INT4"


def configure(parser: argparse.ArgumentParser) -> None:
    add_goal(parser)
    memory = parser.add_mutually_exclusive_group(required=True)
    memory.add_argument(
        "--memory",
        type=parse_size,
        metavar="SIZE",
        help="memory of each GPU, or of the CPU, for weights: as many layers as fit have W8A8 of their own, "
        "and the others compute INT8 weights from INT4",
    )
    memory.add_argument(
        "--kv-tokens",
        type=parse_count,
        metavar="N",
        help="the same, but for the memory that a KV cache of so many tokens leaves for weights",
    )
    parser.add_argument(
        "--sensitivity",
        type=Path,
        metavar="FILE",
        help="sensitivity.json of 'flexquant sensitivity', by which layers are chosen (default: from the "
        "first)",
    )
    add_measuring(parser)


def run(args: argparse.Namespace) -> JsonObject:
    from flexquant.evaluation.workers import import_ahead
    from flexquant.tuning.objectives import decide
    from flexquant.tuning.policy_file import tuned_policy

    goal, output = read_goal(args)
    import_ahead()
    fit = _fit(args)
    tell(fit.remark)
    measured = measure(args, fit.candidates, output)
    decision = decide(measured.samples, measured.names, goal, measured.requests_of(goal), fit.together)
    return write(measured, fit.report(tuned_policy(measured, decision, goal)), output)


def _fit(args: argparse.Namespace) -> Fit:
    """Return what fits into --memory, or beside --kv-tokens; raise FlexQuantError if nothing does."""
    from flexquant.checkpoint.served_config import read_merged_config
    from flexquant.doctor.examining import count_bytes
    from flexquant.layers.memory_fit import Fit, PlanLosses
    from flexquant.layers.sensitivity import policy_that_loads
    from flexquant.tuning.candidates import FROM_INT4, SOURCE, eight_bit, find_variants

    merged, num_layers = read_merged_config(args.folder)
    if SOURCE not in merged.variants:
        raise UsageError(
            f"--memory and --kv-tokens need a variant {SOURCE}, and the checkpoint has "
            f"{', '.join(merged.variants)}; merge one with INT4 weights under that name"
        )
    variants = find_variants(merged, (*(args.variants or merged.variants), SOURCE, FROM_INT4))
    losses, high = None, eight_bit(variants, merged)
    if args.sensitivity is not None and high is not None:
        sizes = {file.name: file.stat().st_size for file in args.folder.glob("*.safetensors")}
        losses = PlanLosses(args.sensitivity, high, (FROM_INT4, SOURCE), num_layers, sizes)
    loaded = count_bytes(args.folder, policy_that_loads(variants), args.tensor_parallel_size)
    memory = args.memory if args.kv_tokens is None else loaded.most_beside(args.kv_tokens)
    return Fit.of(variants, memory, loaded, num_layers, losses, high=high, mixable=merged.mixable_groups)
