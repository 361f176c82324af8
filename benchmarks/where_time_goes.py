# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Where does the time of a decode pass go, operator by operator, under each policy?

    python -m benchmarks.where_time_goes MERGED --policies w8a8,w4a16,w4a8 --output FILE.json

One engine after another, each in this process and with a policy of its own, decodes --sequences sequences. A
pass is timed without the profiler; then PyTorch's profiler tells the time of each operator in as many passes.
What the operators do not account for is Python: vLLM's scheduling, sampling and bookkeeping, and FlexQuant's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.origin import origin
from benchmarks.turns import Decoding
from flexquant.cli._arguments import parse_names
from flexquant.measuring.engine import engine

PASSES = 24
WARM_UP = 4
NAMED = 8
"""Operators that are named for each engine and number of sequences; the others are added up."""


def profile(decoding: Decoding) -> dict[str, Any]:
    """Return the median time of a pass and each operator's own time in a pass, in ms."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    decoding.prefill()
    for _ in range(WARM_UP):
        decoding.step()
    seconds = []
    for _ in range(PASSES):
        began = time.perf_counter()
        decoding.step()
        seconds.append(time.perf_counter() - began)
    with profiler(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(PASSES):
            decoding.step()
    spent = {event.key: event.self_cpu_time_total / 1000 / PASSES for event in profiled.key_averages()}
    operators = sorted(spent.items(), key=lambda item: -item[1])
    found = {name: round(ms, 3) for name, ms in operators[:NAMED]}
    found["other operators"] = round(sum(ms for _, ms in operators[NAMED:]), 3)
    pass_ms = 1000 * statistics.median(seconds)
    return {"pass_ms": round(pass_ms, 3), "operators": found}


def measure(folder: Path, policy: str, sequences: list[int]) -> dict[str, Any]:
    """Return what :func:`profile` tells for each number of sequences under a policy, and the kernels."""
    options: dict[str, Any] = {"max_model_len": 512, "enable_prefix_caching": False}
    found: dict[str, Any] = {}
    for count in sequences:
        # One engine for each number: sequences that are left would be decoded along.
        with engine(folder, flexquant={"policy": policy}, **options) as llm:
            (status,) = llm.collective_rpc("flexquant_status")
            found[str(count)] = profile(Decoding(llm, count))
    return {"kernels": status["kernels"], "sequences": found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="merged checkpoint")
    parser.add_argument("--policies", type=parse_names, default=("w8a8", "w4a16"), metavar="NAMES")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4], metavar="N")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON file to add to")
    args = parser.parse_args()
    results = json.loads(args.output.read_text()) if args.output.is_file() else {}
    results[f"{args.model.parent.name}/{args.model.name}"] = {
        **origin("benchmarks.where_time_goes"),
        "policies": {policy: measure(args.model, policy, args.sequences) for policy in args.policies},
    }
    args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results[f"{args.model.parent.name}/{args.model.name}"]["policies"], indent=1))


if __name__ == "__main__":
    main()
