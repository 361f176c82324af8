# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Say what 'vllm serve' would make of a merged checkpoint on this machine, in seconds, without loading it.

A line a finding: device and versions, policy, attention backend, CUDA graphs, the kernel of every linear
layer and why not a better one, memory, and what would be refused. '!' marks what could be better, 'X' what
keeps it from serving; then the exit code is 1.

examples:
  flexquant doctor model-merged
  flexquant doctor model-merged -- --tensor-parallel-size 2 --max-model-len 8192
"""

from __future__ import annotations

import argparse
from typing import Any

HELP = "say what serving a merged checkpoint on this machine would be like"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="OUT", help="merged checkpoint")
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="ARGUMENT",
        help="after --: arguments of vllm serve, but for the server's",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    from flexquant.doctor.examining import examine

    findings = []
    for finding in examine(args.folder, args.arguments):
        print(finding.line(), flush=True)
        findings.append(finding)
    return {
        "model": args.folder,
        "findings": [finding.to_json() for finding in findings],
        "failed": any(finding.level == "problem" for finding in findings),
    }
