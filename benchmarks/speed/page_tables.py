# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The tables of speed on the pages, each a function that returns one from the committed results."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.proof.report import LIVE_POLICIES, RIVAL_POLICIES, read_document
from benchmarks.result import RESULTS, markdown, read_result
from benchmarks.speed.comparing import paired_ratios, pairs
from benchmarks.speed.live_policies import ratios
from benchmarks.speed.results import read_cells
from benchmarks.speed.serving import START
from benchmarks.speed.subjects import is_peer
from benchmarks.speed.tables import METRICS, by_workload, kernel_results
from flexquant.evaluation.comparison import compare

H100 = RESULTS / "llama-3.1-8b-h100"
LATENCIES = ("TTFT ms", "TPOT ms")
INT8_HEAD = "benchmarks/policies/int8-head.yaml"
ONE_COPY = {"SmolLM2-135M": "smollm2", "0.5 B": "0.5b", "1.5 B": "1.5b"}
"""Models -> the end of the name of their result of one server that took the policies in turns."""


def interval(of_rounds: Sequence[float]) -> str:
    """Return the ratio of paired rounds with its 95 % interval."""
    found = compare(of_rounds)
    return f"{found.ratio:.2f} ({found.low:.2f}–{found.high:.2f})"


def gpu_live(folder: str) -> str:
    """Return policies over static W8A8 on a live server of the 32 B shape, and on a second one if any."""
    servers = {"": LIVE_POLICIES, " by vLLM's choice": RIVAL_POLICIES}
    cells = {
        kernel: read_document(RESULTS / folder / file).get("cells", {}) for kernel, file in servers.items()
    }
    rows = [
        [f"`{w}`", f"`{policy}`{kernel}", *(interval(ratios(found, policy, m)) for m in LATENCIES)]
        for w in cells[""]
        for kernel, of_server in cells.items()
        if (found := of_server.get(w, {}))
        for policy in list(found)[1:]
    ]
    return markdown(["requests", "policy", "TTFT", "TPOT"], rows)


def gpu_ratios() -> str:
    """Return FlexQuant over each static variant on an H100."""
    rows = [
        [
            f"`{workload.name}`",
            f"`{static}`",
            *(
                interval(paired_ratios(subjects[policy], subjects[static], METRICS[metric][0]))
                for metric in LATENCIES
            ),
        ]
        for workload, subjects in by_workload(read_cells(H100), "serving").items()
        for policy, static in pairs(subjects)
    ]
    return markdown(["requests", "over", "TTFT", "TPOT"], rows)


def kernels(folder: str) -> str:
    """Return medians in microseconds of one linear layer."""
    ((layer, outputs, inputs), by_tokens), *_ = kernel_results(read_cells(RESULTS / folder)).items()
    schemes = list(next(iter(by_tokens.values())))
    rows = [
        [str(tokens), *(f"{found[scheme]['microseconds']:.0f}" for scheme in schemes)]
        for tokens, found in list(by_tokens.items())[::2]
    ]
    names = [scheme.removesuffix("LinearKernel").removesuffix("ScaledMM") for scheme in schemes]
    return f"`{layer}`, {inputs} to {outputs}, µs:\n\n" + markdown(["tokens", *names], rows)


def int4_reads(*folders: str) -> str:
    """Return GB/s of each INT4 kernel, and their share of the most that any kernel of the run reads."""
    rows = []
    for folder in folders:
        ((_, outputs, inputs), by_tokens), *_ = kernel_results(read_cells(RESULTS / folder)).items()
        most = max(found["gb_per_s"] for of_size in by_tokens.values() for found in of_size.values())
        for tokens, found in list(by_tokens.items())[:4]:
            int4 = {name: of["gb_per_s"] for name, of in found.items() if name.startswith("w4a16@")}
            shares = [f"{speed:.1f} ({speed / most:.0%})" for speed in int4.values()]
            rows.append([f"{inputs} to {outputs}", str(tokens), *shares])
    names = [name.removeprefix("w4a16@").removesuffix("LinearKernel") for name in int4]
    return markdown(["inputs, outputs", "tokens", *names], rows)


def one_copy_live() -> str:
    """Return one copy and two over W4A16, on one live server of each model."""
    rows = [
        [
            model,
            f"`{workload}`",
            *(
                interval(ratios(found, policy, metric))
                for metric in LATENCIES
                for policy in ("one-copy", "phase-batch")
            ),
        ]
        for model, name in ONE_COPY.items()
        for workload, found in read_result(f"one-copy-live-{name}.json")["cells"].items()
    ]
    header = [f"{metric}: {what}" for metric in ("TTFT", "TPOT") for what in ("one copy", "two")]
    return markdown(["model", "requests", *header], rows)


def process_gib(cells: list[dict[str, Any]]) -> dict[str, float]:
    """Return the memory of each server's processes, in GiB."""
    return {c["parameters"]["subject"]: c["result"]["process_gib"] for c in cells if c["part"] == START}


def beside(folder: str, reference: str) -> str:
    """Return servers over the one of ``reference`` beside them, and what each took in memory."""
    cells = read_cells(RESULTS / folder)
    gib = process_gib(cells)
    rows = [
        [
            f"`{workload.name}`",
            f"`{subject}`",
            f"{gib[subject]:.2f}",
            *(interval(of_rounds) for of_rounds in ratios),
        ]
        for workload, subjects in by_workload(cells, "serving").items()
        for subject, rounds in subjects.items()
        if subject != reference
        for ratios in [[paired_ratios(rounds, subjects[reference], METRICS[m][0]) for m in LATENCIES]]
    ]
    return markdown(
        ["requests", f"over `{reference}` ({gib[reference]:.2f} GiB)", "GiB", "TTFT", "TPOT"], rows
    )


def int8_head(*folders: str) -> str:
    """Return `phase-batch` with the lm_head in INT8 over the same policy without, on servers side by side."""
    rows = []
    for folder in folders:
        cells = read_cells(RESULTS / folder)
        gib = process_gib(cells)
        memory = f"{gib[f'flexquant:{INT8_HEAD}'] - gib['flexquant:phase-batch']:+.2f}"
        for workload, subjects in by_workload(cells, "serving").items():
            without, with_it = subjects["flexquant:phase-batch"], subjects[f"flexquant:{INT8_HEAD}"]
            of_rounds = (paired_ratios(with_it, without, METRICS[metric][0]) for metric in LATENCIES)
            ratios = map(interval, of_rounds)
            rows.append([cells[0]["parameters"]["model"], f"`{workload.name}`", *ratios, memory])
    return markdown(["model", "requests", "TTFT", "TPOT", "process, GiB"], rows)


def peers(*folders: str) -> str:
    """Return servers' times, medians in ms, and FlexQuant over each peer; of several runs the latter."""
    times, ratios = list[list[str]](), list[list[str]]()
    columns = dict[str, tuple[Any, str]]()
    for folder in folders:
        cells = read_cells(RESULTS / folder)
        measured = by_workload(cells, "serving")
        alone = sorted((w for w in measured if w.at_once == 1), key=lambda w: w.input)
        together = [w for w in measured if w.at_once is None]
        columns = {f"first of {w.input:,}": (w, "TTFT ms") for w in alone}
        columns |= {"next": (alone[0], "TPOT ms")}
        columns |= {f"next of {w.requests} at once": (w, "TPOT ms") for w in together}
        subjects = list(dict.fromkeys(subject for found in measured.values() for subject in found))
        for subject in subjects:
            row = [f"`{subject}`"]
            for workload, metric in columns.values():
                get, form = METRICS[metric]
                values = [get(result) for result in measured[workload].get(subject, {}).values()]
                row.append(format(median(values), form) if values else "–")
            times.append(row)
        for subject, peer in (pair for pair in pairs(subjects) if is_peer(pair[1])):
            both = [(measured[w], METRICS[m][0]) for w, m in columns.values()]
            found = [paired_ratios(of[subject], of.get(peer, {}), get) for of, get in both]
            model = [cells[0]["parameters"]["model"]] if folders[1:] else []
            name = [f"`{peer}`"] if folders[1:] else [f"`{subject}` / `{peer}`"]
            ratios.append([*model, *name, *(interval(rounds) if rounds else "–" for rounds in found)])
    if folders[1:]:
        return markdown(["model", "over", *columns], ratios)
    return "\n\n".join(markdown([what, *columns], rows) for what, rows in (("ms", times), ("ratio", ratios)))


def tuned(folder: str) -> str:
    """Return a tuned policy over each static variant, on servers side by side."""
    rows = []
    for workload, subjects in by_workload(read_cells(RESULTS / folder), "serving").items():
        (policy,) = (subject for subject in subjects if subject.startswith("flexquant:"))
        for static in (subject for subject in subjects if subject != policy):
            found = [paired_ratios(subjects[policy], subjects[static], METRICS[m][0]) for m in LATENCIES]
            cells = (interval(of_rounds) if of_rounds else "–" for of_rounds in found)
            rows.append([f"`{workload.name}`", f"`{static}`", *cells])
    return markdown(["requests", "over", "TTFT", "TPOT"], rows)


TABLES = (
    gpu_live,
    gpu_ratios,
    kernels,
    int4_reads,
    one_copy_live,
    beside,
    int8_head,
    peers,
    tuned,
)
