# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Check in seconds, without loading weights, how 'vllm serve' would run a merged checkpoint on this machine.

Prints one finding a line: device and versions, policy, attention backend, CUDA graphs, the kernel of every
linear layer and why not a better one, memory, and what would be refused. '!' marks what could be better, 'X'
what prevents serving; the exit code is then 1.

examples:
  flexquant doctor model-merged
  flexquant doctor model-merged -- --tensor-parallel-size 2 --max-model-len 8192
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from flexquant.checkpoint.model_config import JsonObject


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="OUT", help="merged checkpoint")
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="ARGUMENT",
        help="after --: arguments of vllm serve for the engine, not for the API server",
    )


def run(args: argparse.Namespace) -> JsonObject:
    from flexquant.doctor.examining import examine

    findings = []
    for finding in examine(args.folder, args.arguments):
        print(finding.line(), flush=True)
        findings.append(finding)
    return {
        "model": args.folder,
        "findings": [asdict(finding) for finding in findings],
        "failed": any(finding.level == "problem" for finding in findings),
    }
