# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Speed and memory of FlexQuant against stock vLLM on the same weights.

Measures vLLM's linear layers by scheme (kernels) and servers under load (serving). Every cell is written as
it finishes: started again, the same command goes on where it stopped. Synthetic models are made in --work.
benchmarks/README.md tells how to read the report, and names the other benchmarks, such as
`python -m benchmarks.merge`.

examples:
  python -m benchmarks --quick
  python -m benchmarks run --model llama-3.1-8b --parts kernels,serving --output benchmarks/results/h200-8b
  python -m benchmarks run --model w8a8=DIR w4a16=DIR merged=DIR --output benchmarks/results/my-model \\
      --subjects w8a8,w4a16,flexquant:phase-batch,flexquant:my-policy.yaml \\
      --serving 8x1024+128 200x1024+256@10~0.5
  python -m benchmarks run --model bf16=DIR merged=DIR --output benchmarks/results/my-peers --parts serving \\
      --no-eager --subjects flexquant:phase-batch,llama.cpp:Q4_0,openvino:Q4_0
  python -m benchmarks report benchmarks/results/h200-8b
  python -m benchmarks prove llama-3.1-8b
  python -m benchmarks policies http://127.0.0.1:8000 --policy w4a16 --policy one-copy --serving 1x512+32 \\
      --output benchmarks/results/live.json
"""

from __future__ import annotations

import signal
import sys

from benchmarks.proof.proving import prove
from benchmarks.speed.command_line import make_parser, run
from benchmarks.speed.live_policies import compare_live_policies
from benchmarks.speed.report import write_report
from flexquant.errors import FlexQuantError


def main(arguments: list[str]) -> int:
    # A stopped run leaves no servers behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = make_parser(__doc__ or "")
    if arguments[:1] == ["--quick"]:
        arguments = ["run", *arguments]
    args = parser.parse_args(arguments)
    try:
        if args.command == "prove":
            print(prove(args).read_text(encoding="utf-8"))
            return 0
        if args.command == "policies":
            compare_live_policies(args)
            return 0
        left = run(args) if args.command == "run" else 0
        print(f"wrote {write_report(args.output)}", flush=True)
    except FlexQuantError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    if left:
        print(f"out of time with {left} cells left; start the same command again to go on")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
