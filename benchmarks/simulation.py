# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Does ``flexquant simulate`` tell the truth? A real server under ``vllm bench serve``, and its simulation.

    python -m benchmarks.simulation MERGED --times tuned.yaml --policy w8a8 --policy phase \
        --output benchmarks/results/simulation-cpu.json

For each policy ``vllm serve`` is started on the merged checkpoint, and ``vllm bench serve`` sends it the
requests of a trace at their times (its dataset ``timed_trace``; random token ids, no early end). Then
FlexQuant simulates the requests as they were sent, by the start times and lengths that the client recorded.
Prefix caching is off. The server has to run as it did when the times were measured: eager or compiled, the
same threads. Prints a table and, as the last line, the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.arrivals import make_trace
from benchmarks.speed.results import git_commit
from benchmarks.speed.servers import MODEL_NAME, Server, ServerOptions
from benchmarks.speed.subjects import FLEXQUANT, Subject, parse_subject
from benchmarks.speed.workloads import WRITTEN, Workload
from flexquant.checkpoint.served_config import read_merged_config
from flexquant.measuring.machine import describe_command, describe_machine, describe_versions
from flexquant.planning.pass_cost import PassCost
from flexquant.planning.replaying import replay
from flexquant.planning.server import Limits, Machine, server_limits
from flexquant.planning.simulation_report import summarise_replay
from flexquant.planning.times import check_times, find_times, route_table
from flexquant.planning.trace import Request, read_trace
from flexquant.policy.rules import load_policy

COMPARED = (
    "mean_ttft_ms",
    "median_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "p99_itl_ms",
    "output_throughput",
)
WARM_UPS = 2


def find_trace(text: str, burstiness: float) -> list[Request]:
    """Return a built-in trace, the trace in a file, or a random one for e.g. ``40x96+24@1~0.5``."""
    if WRITTEN.fullmatch(text) is None:
        return read_trace(text)
    w = Workload.parse(text)
    return make_trace(w.requests, w.rate or 1e6, burstiness, w.input, w.output, w.spread, seed=1)


def write_timed_trace(trace: Sequence[Request], path: Path) -> None:
    """Write a trace for the dataset ``timed_trace``; one hash id a prompt makes every prompt differ."""
    entries = [
        {"timestamp": r.arrival, "input_length": r.input, "output_length": r.output, "hash_ids": [number]}
        for number, r in enumerate(trace)
    ]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def bench(server: Server, options: ServerOptions, trace: Sequence[Request], folder: Path) -> dict[str, Any]:
    """Send a trace to a server; return the detailed result of ``vllm bench serve``."""
    write_timed_trace(trace, folder / "trace.jsonl")
    values = {
        "backend": "openai",
        "base-url": server.url,
        "model": MODEL_NAME,
        "tokenizer": server.folder,
        "dataset-name": "timed_trace",
        "dataset-path": folder / "trace.jsonl",
        "timed-trace-chunk-hash-size": max(r.input for r in trace),
        "num-prompts": len(trace),
        "num-warmups": WARM_UPS,
        "temperature": 0,
        "percentile-metrics": "ttft,tpot,itl",
        "metric-percentiles": "99",
        "result-dir": folder,
        "result-filename": "result.json",
    }
    arguments = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    arguments += ["--disable-tqdm", "--save-result", "--save-detailed"]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", *arguments]
    with open(server.log.with_suffix(".bench.log"), "a") as log:
        subprocess.run(
            command, check=True, stdout=log, stderr=subprocess.STDOUT, env=options.environment(server.subject)
        )
    found = json.loads((folder / "result.json").read_text())
    if found["failed"]:
        raise RuntimeError(f"{found['failed']} of {len(trace)} requests failed; see {log.name}")
    return found


def sent_requests(found: dict[str, Any]) -> list[Request]:
    """Return the requests as they were sent, the first at 0 s."""
    sent = sorted(zip(found["start_times"], found["input_lens"], found["output_lens"], strict=True))
    return [Request(start - sent[0][0], input, output) for start, input, output in sent]


def compare(found: dict[str, Any], simulated: dict[str, Any]) -> dict[str, Any]:
    """Return both sides' numbers, and the ratio of simulated to measured."""
    return {
        "measured": {key: found[key] for key in COMPARED},
        "simulated": {key: simulated[key] for key in COMPARED},
        "ratio": {key: simulated[key] / found[key] for key in COMPARED},
        "passes": simulated["passes"],
        "busy": simulated["busy"],
    }


def limits_of(
    options: ServerOptions, max_num_batched_tokens: int, blocks: int | None, gpu: str | None
) -> Limits:
    """Return a server's limits; vLLM keeps one of the KV cache's ``blocks`` for padding."""
    machine = Machine(gpu, eager=options.eager)
    limits = server_limits(machine, max_num_batched_tokens, options.max_sequences)
    if blocks is None:
        return limits
    return replace(limits, kv_cache_tokens=(blocks - 1) * limits.block_size)


def measure(subject: Subject, args: argparse.Namespace, trace: list[Request]) -> list[dict[str, Any]]:
    """Return one comparison for each round of a policy, served and simulated."""
    assert subject.policy is not None
    times, _ = find_times(args.policy, args.times)
    model = read_merged_config(args.folder)
    policy = load_policy(subject.policy)
    check_times(subject.policy, policy, times)
    options = ServerOptions(
        max_length=max(r.input + r.output for r in trace),
        max_sequences=args.max_num_seqs,
        eager=args.eager,
        kv_cache_gib=args.kv_cache_gib,
        memory_share=0.9,
        extra=("--max-num-batched-tokens", str(args.max_num_batched_tokens)),
    )
    args.logs.mkdir(parents=True, exist_ok=True)
    log = args.logs / f"simulation-{Path(subject.policy).stem}.log"
    gpu = describe_machine()["gpu"]
    server = Server(subject, args.folder, options, gpu is not None, log)
    rounds = []
    try:
        told = server.wait_until_ready(args.start_timeout)
        limits = limits_of(options, args.max_num_batched_tokens, told.get("kv_cache_blocks"), gpu)
        table, cost = route_table(policy, times, limits, model), PassCost(times)
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory() as folder:
                found = bench(server, options, trace, Path(folder))
            rounds.append(compare(found, summarise_replay(replay(sent_requests(found), table, cost, limits))))
            print(format_round(subject.policy, rounds[-1]), flush=True)
    finally:
        server.stop()
    return rounds


def format_round(policy: str, found: dict[str, Any]) -> str:
    numbers = (
        f"{key} {found['measured'][key]:.4g} measured, {found['simulated'][key]:.4g} simulated "
        f"({found['ratio'][key]:.2f}x)"
        for key in COMPARED
    )
    return "\n  ".join([Path(policy).name, *numbers])


def write_atomically(path: Path, document: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="MERGED")
    parser.add_argument("--times", metavar="POLICY", help="tuned policy (default: the first of --policy)")
    parser.add_argument("--policy", action="append", required=True, metavar="NAME|FILE")
    parser.add_argument(
        "--trace",
        default="24x96+24@0.4~0.5",
        metavar="NAME|FILE|WORKLOAD",
        help="trace, or REQUESTSxINPUT+OUTPUT@RATE~SPREAD (default: %(default)s)",
    )
    parser.add_argument(
        "--burstiness", type=float, default=1.0, help="burstiness of a WORKLOAD (default: 1, Poisson)"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--kv-cache-gib", type=float, default=1.0)
    parser.add_argument("--start-timeout", type=float, default=900, metavar="SECONDS")
    parser.add_argument("--logs", type=Path, default=Path(".work/logs"))
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    # A stopped run leaves no server behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    trace = find_trace(args.trace, args.burstiness)
    times, source = find_times(args.policy, args.times)
    document: dict[str, Any] = {
        "machine": describe_machine(),
        "versions": describe_versions(),
        "commit": git_commit(),
        "argv": ["python", "-m", "benchmarks.simulation", *describe_command()[1:]],
        "times": {"policy": Path(source).name, "origin": dict(times.origin)},
        "trace": {"name": args.trace, "burstiness": args.burstiness, "requests": len(trace)},
        "eager": args.eager,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "max_num_seqs": args.max_num_seqs,
        "results": {},
    }
    for name in args.policy:
        document["results"][Path(name).name] = measure(parse_subject(FLEXQUANT + name), args, trace)
        document["finished"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        write_atomically(args.output, document)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
