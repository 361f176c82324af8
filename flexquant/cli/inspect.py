# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Show what a merged checkpoint holds: variants, bytes, bits per parameter, default policy, KV cache.

It also shows which layers of which variant the default policy loads, and how many bytes they have.

Only headers and configs are read, so this takes a second whatever the model's size.

example:
  flexquant inspect model-merged
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from flexquant.checkpoint.model_config import JsonObject

if TYPE_CHECKING:
    from flexquant.checkpoint.weight_bytes import CheckpointReport

HELP = "show what a merged checkpoint holds"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="merged checkpoint")


def run(args: argparse.Namespace) -> JsonObject:
    from flexquant.checkpoint.folder import recipe_name
    from flexquant.checkpoint.measured_loss import loss_lines, read_losses
    from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
    from flexquant.checkpoint.model_config import count_layers
    from flexquant.checkpoint.weight_bytes import (
        BytesByRange,
        bytes_in_use,
        describe_bytes,
        report_checkpoint,
    )
    from flexquant.errors import FlexQuantError
    from flexquant.policy.routes import build_route_table
    from flexquant.policy.rules import choose_policy

    checkpoint = MergedCheckpoint.open(args.folder, published=True)
    merged, layers = checkpoint.merged, count_layers(checkpoint.config)
    report = report_checkpoint(merged, layers, checkpoint.tensors)
    loaded: BytesByRange = {}
    try:
        _, policy = choose_policy(None, merged.policy)
        routes = build_route_table(
            policy, merged.variants, layers, sys.maxsize, mixable=merged.mixable_groups
        )
        sources = {name: derivation.source for name, derivation in routes.derived.items()}
        held = {name: numbers for name, numbers in routes.layers.items() if routes.has_weights(name)}
        loaded = bytes_in_use(merged, checkpoint.tensors, held, sources)
        said = describe_bytes(loaded)
    except FlexQuantError as e:
        said = f"unknown, since the policy cannot be served: {e}"
    print(f"{args.folder}: {format_checkpoint_report(report)}\nloaded under the default policy: {said}")
    losses = read_losses({name: checkpoint.folder / recipe_name(name) for name in report.variants})
    for line in loss_lines(losses):
        print(line)
    of_variants = {name: {k: v.model_dump() for k, v in kinds.items()} for name, kinds in losses.items()}
    return {**report.to_json(), "loaded": loaded, "losses": of_variants}


def format_checkpoint_report(report: CheckpointReport) -> str:
    """Return the report as text for a terminal."""
    from flexquant.checkpoint.merged_config import SHARED
    from flexquant.checkpoint.weight_bytes import describe_kv, describe_mixing, format_bytes
    from flexquant.documents.results import table_lines

    parameters = max(v.parameters for v in report.variants.values())
    of_16_bit = (
        f"{100 * report.total_bytes / max(1, report.bytes_16bit):.0f} % of the model in 16 bits "
        f"({format_bytes(report.bytes_16bit)}, {parameters:,} parameters)"
    )
    rows = [
        ["", "bytes", "bits/param", "scheme"],
        *(
            [name, format_bytes(v.own_bytes), f"{v.bits_per_parameter:.2f}", v.scheme]
            for name, v in report.variants.items()
        ),
        [SHARED, format_bytes(report.shared_bytes)],
        ["total", format_bytes(report.total_bytes), "", of_16_bit],
    ]
    return "\n".join(
        [
            f"{report.base_architecture}, {report.num_layers} layers, {len(report.variants)} variant(s)",
            "",
            *table_lines(rows, numbers=(1, 2)),
            "",
            f"default policy: {report.policy_text}",
            f"layers of different variants in one plan: {describe_mixing(report)}",
            f"KV cache: {describe_kv(report.kv_compatibility)}",
        ]
    )
