# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Show what a merged checkpoint holds: variants, bytes, bits per parameter, default policy, KV cache.

Only headers and configs are read, so this takes a second whatever the model's size.

example:
  flexquant inspect model-merged
"""

from __future__ import annotations

import argparse
from typing import Any

HELP = "show what a merged checkpoint holds"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="merged checkpoint")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from flexquant.checkpoint.contents import format_report, make_report
    from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
    from flexquant.checkpoint.model_config import count_layers

    checkpoint = MergedCheckpoint.open(args.folder)
    report = make_report(checkpoint.merged, count_layers(checkpoint.config), checkpoint.tensors)
    print(f"{args.folder}: {format_report(report)}")
    return report.to_json()
