# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""README tables and sentences about live servers, and about whole answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.generation.tables import table
from benchmarks.table import markdown

RESULTS = Path(__file__).parent / "results"
HELD = ("w8a8", "w4a16", "shared")


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def own_cost() -> str:
    """Return what FlexQuant adds to a decode pass of each model, in percent with the interval."""
    rows = [
        [model, f"{found['pass_ms']:.1f}", *(_percent(found[end]) for end in ("ratio", "low", "high"))]
        for model, found in read("own-cost.json").items()
    ]
    return markdown(["model", "ms a pass", "time", "at least", "at most"], rows)


def own_time() -> str:
    """Return the microseconds and calls of FlexQuant's own Python in a pass, before and now."""
    before, now = (read(f"own-time{which}.json")["own"] for which in ("-before", ""))
    rows = []
    for phase in before:
        times = [of[phase]["us"] for of in (before, now)]
        spans = (f"{t['median']:.0f} ({t['lower_quartile']:.0f} to {t['upper_quartile']:.0f})" for t in times)
        rows.append([phase, *spans, *(f"{of[phase]['calls']['median']:.0f}" for of in (before, now))])
    return markdown(["pass", "µs before", "µs now", "calls before", "calls now"], rows)


def watching() -> str:
    """Return how much longer a pass and a request take when watched, in percent with the intervals."""
    found = read("watching.json")
    watched = {"the worker's own counts, times, trace and plans by request": found["worker"]}
    watched["an open page and a Prometheus"] = found["server"]["once"]
    rows = [
        [what, *(_percent(ratio[end]) for end in ("ratio", "low", "high"))] for what, ratio in watched.items()
    ]
    return markdown(["watched by", "time", "at least", "at most"], rows)


PROCESSES = {"api_server": "API server", "engine_core": "engine core", "worker": "worker", "all": "all"}


def memory() -> str:
    """Return the MiB of each process of a server under load, and of stock vLLM's, with their last slopes."""
    found = read("load.json")
    servers = {"FlexQuant": found["memory"], "stock vLLM, 16 bit": found["memory_of_stock_vllm"]}
    rows = []
    for server, processes in servers.items():
        for key, process in PROCESSES.items():
            minutes = processes[key]["mib_by_minute"]
            moments = [minutes[i * len(minutes) // 4] for i in range(4)]
            slope = 60 * np.polyfit(range(len(minutes) // 4), minutes[-(len(minutes) // 4) :], 1)[0]
            mib = [f"{one:.0f}" for one in (*moments, processes[key]["last_mib"])]
            rows.append([server, process, *mib, f"{slope:+.0f}"])
    header = ["server", "process", "MiB at first", "after ¼", "after ½", "after ¾", "at the end"]
    return markdown([*header, "MiB an hour, last quarter"], rows)


def loaded() -> str:
    """Return what became of the requests under load, of the counts, and of the answers."""
    found = read("load.json")
    requests, counted, answers = found["requests"], found["counters"], found["answers"]
    parted = ""
    if gaps := answers["gaps"]:
        parted = f", the others part where two tokens are at most {max(gaps):.2f} nats apart"
    return (
        f"{requests['sent']:,} requests in {found['seconds'] / 60:.0f} minutes, {len(found['changes'])} "
        f"changes of the policy meanwhile: {requests['failed']} failed. FlexQuant counted "
        f"{counted['passes']:,.0f} passes and {counted['tokens']:,.0f} tokens, its trace "
        f"{counted['passes_in_trace']:,} and {counted['tokens_in_trace']:,}, vLLM "
        f"{counted['steps_by_vllm']:,.0f} and {counted['tokens_by_vllm']:,.0f}. Of {answers['compared']} "
        f"answers computed again, alone, by the recorded routes, {answers['equal']} are equal{parted}."
    )


def switching() -> str:
    """Return how much longer passes take with alternating plans than with one plan after the other."""
    found = read("switching.json")
    more, low, high = (_percent(found[end]) for end in ("ratio", "low", "high"))
    return (
        f"Passes of {found['pass_ms']:.1f} ms whose plans alternate take {more} of time ({low} to {high}) "
        f"against the same passes, one plan after the other: {len(found['on_seconds']):,} paired rounds."
    )


def starting() -> str:
    """Return the seconds until a server answers, and how fast it then decodes, eager and compiled."""
    rows = [
        [server, one["start"], f"{one['seconds']:.0f}", f"{one['token_ms']:.1f}"]
        for server, starts in read("starting.json")["starts"].items()
        for one in starts
    ]
    return markdown(["server", "start", "seconds until it answers", "ms per token, alone"], rows)


def layers_in_use() -> str:
    """Return the MiB of a process that serves a plan, and of the weights in it, before and after."""
    runs = read("layers-in-use.json")
    rows = [
        [plan, label, f"{found['process_mib']:.0f}", *(f"{found['weights_mib'].get(v, 0):.0f}" for v in HELD)]
        for plan in next(iter(runs.values()))["plans"]
        for label, run in runs.items()
        for found in [run["plans"][plan]]
    ]
    return markdown(["plan", "release", "MiB of the process", *(f"weights of {v}" for v in HELD)], rows)


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2f} %"


def disaggregated() -> str:
    """Return the MiB of weights in each server, by variant, for both policies of the decode server."""
    rows = []
    for policy in ("w4a16", "phase-batch"):
        found = read(f"disaggregated-{policy}.json")
        for server, weights in found["weights_mib"].items():
            parts = ", ".join(f"{variant} {mib:.1f}" for variant, mib in weights.items())
            rows.append([f"`{policy}`", server, parts, f"{sum(weights.values()):.1f}"])
    return markdown(["policy of the decode server", "server", "MiB of weights", "together"], rows)


def generation() -> str:
    """Return what whole answers lose under each policy, and what was asked to measure it."""
    return _whole_answers("generation.json")


def generation_one_copy() -> str:
    """Return the same with INT8 computed from one copy."""
    return _whole_answers("generation-one-copy.json")


def _whole_answers(file: str) -> str:
    found = read(file)
    settings = found["settings"]
    tasks, tokens = settings["tasks"], settings["tokens"]
    return (
        f"{table(found)}\n\n{tasks['arithmetic']} tasks of arithmetic, {tasks['instructions']} instructions "
        f"(answers of up to {tokens['arithmetic']} tokens), {tasks['long']} open questions (up to "
        f"{tokens['long']}); {settings['batch_size']} prompts at once, seed {settings['seed']}."
    )


PARTS = {
    "quantised linear layers": ("qlinear", "int4pack", "scaled_mm", "woq_linear"),
    "lm_head, in 16 bit": ("linear_unary", "addmm", "aten::mm", "aten::linear"),
    "attention and KV cache": ("attention", "kv_cache"),
}
"""Part of a pass -> what occurs in the names of its operators."""


def operators() -> str:
    """Return how many ms each part of a decode pass takes at the 1.5 B shape, by policy and sequences."""
    (found,) = read("where-time-goes.json").values()
    rows = []
    for policy, measured in found["policies"].items():
        for sequences, one in measured["sequences"].items():
            rest, parts = dict(one["operators"]), []
            for names in PARTS.values():
                inside = [name for name in rest if any(part in name for part in names)]
                parts.append(sum(rest.pop(name) for name in inside))
            parts += [sum(rest.values()), one["pass_ms"] - sum(one["operators"].values())]
            rows.append([f"`{policy}`", sequences, *(f"{ms:.1f}" for ms in (one["pass_ms"], *parts))])
    return markdown(
        ["variant", "sequences", "a pass, ms", *PARTS, "other operators", "the rest: Python"], rows
    )
