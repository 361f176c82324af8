# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Compare policies on one live server: it takes one after the other, without a restart, in paired rounds.

One server needs no memory beside itself, and servers cannot differ. It has to hold the layers of all these
policies from its start: start it with a policy that uses them all, with VLLM_PLUGINS=flexquant, and with
FLEXQUANT_ADMIN_KEY, which this command needs too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.result import markdown, origin, write_result
from benchmarks.speed.tables import METRICS, RATIOS
from benchmarks.speed.worker import Worker, WorkerError
from benchmarks.speed.workloads import Workload
from flexquant.cli._arguments import add_effort
from flexquant.errors import FlexQuantError
from flexquant.evaluation.comparison import Effort, compare
from flexquant.policy.rules import load_policy
from flexquant.serving.frontend.client import apply_policy

EFFORT = Effort(rounds=6, max_rounds=12)
WAKE_UP_TOKENS = 3
"""Most tokens of the answer to the first workload's request, sent after every change and not timed."""
SECONDS = 600.0
"""Time for one workload."""

Cells = dict[str, dict[str, list[dict[str, Any]]]]
"""Workload -> policy -> the result of each round."""


def add_policies_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("url", help="of the server, e.g. http://127.0.0.1:8000")
    add("--policy", action="append", required=True, help="name or file; the first is what others are held to")
    add("--serving", nargs="+", required=True, metavar="REQUESTSxINPUT+OUTPUT[@RATE]", help="workloads")
    add("--output", type=Path, required=True, metavar="FILE", help="JSON file to write")
    add("--gate", type=Path, metavar="FILE", help="import vLLM, then wait until this file is there")
    add_effort(add, "each workload")


def compare_live_policies(args: argparse.Namespace) -> None:
    """Measure, print a table, and write ``args.output`` after every round."""
    policies = {Path(name).stem: load_policy(name) for name in dict.fromkeys(args.policy)}
    if len(policies) < max(2, len(set(args.policy))):
        raise FlexQuantError("one policy has nothing to be compared with; give --policy twice, of two names")
    workloads = [Workload.parse(name) for name in args.serving]
    wake_up = replace(workloads[0], requests=1, output=min(WAKE_UP_TOKENS, workloads[0].output))
    url = args.url.rstrip("/").removesuffix("/v1")
    cells: Cells = {w.name: {name: [] for name in policies} for w in workloads}
    with tempfile.TemporaryDirectory() as work:
        client = Worker("benchmarks.speed.bench_client", Path(work, "client.log"))

        def bench(workload: Workload, number: int) -> dict[str, Any]:
            try:
                result: dict[str, Any] = client.call(
                    workload.bench_arguments(url, model, folder, number), SECONDS
                )
            except WorkerError as e:
                raise FlexQuantError(f"{url} did not answer {workload.name}: {e}") from e
            return result

        effort = EFFORT.changed(args.rounds, args.max_rounds, args.width)
        try:
            if args.gate is not None:
                client.call([], SECONDS)
                print(f"waits for {args.gate.name}", flush=True)
                wait_for_file(args.gate)
            model, folder = served_model(url)
            for number in range(effort.max_rounds):
                wide = [
                    workload
                    for workload in workloads
                    if number < effort.rounds or not is_decided(cells[workload.name], effort.width)
                ]
                if not wide:
                    break
                for name in list(policies)[:: -1 if number % 2 else 1]:
                    apply_policy(url, policies[name])
                    bench(wake_up, -1)
                    for workload in wide:
                        cells[workload.name][name].append(bench(workload, number))
                print(f"round {number}: {', '.join(workload.name for workload in wide)}", flush=True)
                served = "/".join(Path(folder).parts[-2:])
                write_result(args.output, {**origin("benchmarks"), "model": served, "cells": cells})
        finally:
            client.close()
    print(table(cells))


def wait_for_file(file: Path) -> None:
    while not file.exists():
        time.sleep(0.1)


def served_model(url: str) -> tuple[str, str]:
    """Return the name of the model that a server has, and the folder or id that it was started with."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as reply:
            (model, *_) = json.load(reply)["data"]
    except (OSError, ValueError, KeyError) as e:
        raise FlexQuantError(
            f"{url} names no model ({e}); give the URL of a server that vllm serve started"
        ) from e
    return str(model["id"]), str(model["root"])


def ratios(of_policies: dict[str, list[dict[str, Any]]], name: str, metric: str) -> list[float]:
    """Return a policy's rounds over those of the first policy."""
    first = next(iter(of_policies.values()))
    value = METRICS[metric][0]
    return [value(a) / value(b) for a, b in zip(of_policies[name], first, strict=True)]


def is_decided(of_policies: dict[str, list[dict[str, Any]]], width: float) -> bool:
    """Return whether the intervals of all ratios are narrower than ``width``."""
    others = list(of_policies)[1:]
    return all(compare(ratios(of_policies, n, m)).is_narrow(width) for n in others for m in RATIOS)


def table(cells: Cells) -> str:
    """Return a Markdown table: medians, and ratios to the first policy with their 95 % intervals."""
    rows = []
    for workload, of_policies in cells.items():
        first = next(iter(of_policies))
        for name, results in of_policies.items():
            row = [workload, f"`{name}`"]
            for metric in RATIOS:
                value = METRICS[metric][0]
                median = f"{statistics.median(map(value, results)):.4g}"
                beside = "" if name == first else f": {compare(ratios(of_policies, name, metric))}"
                row.append(median + beside)
            rows.append(row)
    first = next(iter(next(iter(cells.values()))))
    return markdown(["requests", "policy", *(f"{metric}, over `{first}`" for metric in RATIOS)], rows)
