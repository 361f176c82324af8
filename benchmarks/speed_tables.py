# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""README tables of the committed speed runs: latencies, ratios, and kernels."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.serving_tables import RESULTS, read
from benchmarks.speed.comparing import (
    Measured,
    Rounds,
    best_static,
    compare_beside,
    paired_ratios,
    routed,
    second_server,
    summarise,
)
from benchmarks.speed.live_policies import ratios
from benchmarks.speed.results import read_cells, read_header
from benchmarks.speed.subjects import STATIC
from benchmarks.speed.tables import (
    LATENCIES,
    METRICS,
    RATIOS,
    SUMMARY,
    by_workload,
    kernel_results,
    ratio_table,
    said,
    summary_rows,
)
from benchmarks.table import markdown
from flexquant.measuring.comparison import (
    EQUAL,
    FEWEST_ROUNDS,
    HIGHER,
    LOWER,
    UNKNOWN,
    Comparison,
    compare,
    percent,
)

SPEED = RESULTS / "smollm2-135m-cpu"
SPEED_ON_GPU = RESULTS / "llama-3.1-8b-h100"
SPEED_ON_AVX512 = RESULTS / "1.5b-avx512"
TUNED_ON_AVX512 = "flexquant:benchmarks/results/tuning/1.5b-avx512.yaml"
SPEED_ON_ZEN = RESULTS / "1.5b-zen4"
TUNED_ON_ZEN = "flexquant:benchmarks/results/tuning/1.5b-zen4.yaml"
TUNED_SMALL = "flexquant:benchmarks/results/tuning/smollm2-135m-avx512.yaml"
RUNS_ON_CPUS = (
    "smollm2-135m-avx512",
    "smollm2-135m-avx512-stock",
    "1.5b-avx512",
    "1.5b-avx512-stock",
    "0.5b-avx512",
    "0.5b-avx512-stock",
    "1.5b-zen4",
    "1.5b-zen4-w4a8",
    "1.5b-zen4-again",
    "0.5b-zen4",
    "smollm2-135m-cpu",
)
STATICS = ("w8a8", "w4a16")
ROUTED = "flexquant:phase-batch"


def speed(folder: Path = SPEED, statics: Sequence[str] = STATICS, policy: str = ROUTED) -> str:
    """Return medians over rounds, of the static variants and of FlexQuant with its default policy."""
    rows = []
    for workload, subjects in by_workload(read_cells(folder), "serving").items():
        row = [f"`{workload.name}`"]
        for get, form in (METRICS[name] for name in RATIOS):
            medians = (statistics.median(map(get, subjects[s].values())) for s in (*statics, policy))
            row += [format(median, form) for median in medians]
        rows.append(row)
    header = [f"{name}: {subject}" for name in RATIOS for subject in (*statics, "FlexQuant")]
    return markdown(["requests", *header], rows)


def gpu_speed() -> str:
    return speed(SPEED_ON_GPU)


def gpu_ratios() -> str:
    """Return FlexQuant over each static variant, and each constant policy over its own static variant."""
    cells = read_cells(SPEED_ON_GPU)
    tables = [ratio_table(by_workload(cells, "serving"), constant=False)]
    tables.append(ratio_table(by_workload(cells, "overhead"), constant=True))
    return "\n\n".join(tables)


def avx512_speed() -> str:
    return speed(SPEED_ON_AVX512, ("w8a8", "w4a16-chosen"), TUNED_ON_AVX512)


def avx512_small() -> str:
    """Return the medians of latencies, beside every static precision."""
    measured = by_workload(read_cells(RESULTS / "smollm2-135m-avx512"), "serving")
    return "\n\n".join(medians(measured, name, TUNED_SMALL) for name in LATENCIES)


def zen_speed() -> str:
    return speed(SPEED_ON_ZEN, ("w8a8",), TUNED_ON_ZEN)


def zen_together() -> str:
    """Return FlexQuant over static W8A8, all kinds of requests together."""
    measured = by_workload(read_cells(SPEED_ON_ZEN), "serving")
    together = {name: summarise(measured, TUNED_ON_ZEN, METRICS[name][0]).together for name in LATENCIES}
    words = " and ".join(
        f"{name.removesuffix(' ms')} is {found.ratio:.3f} ({found.low:.3f} – {found.high:.3f}) times that of "
        f"static W8A8 ({said(found, name)})"
        for name, found in together.items()
    )
    return f"Over all kinds of requests its {words}."


def cpu_ratios() -> str:
    """Return FlexQuant over each static subject, for every run on a CPU."""
    rows = []
    for folder in RUNS_ON_CPUS:
        found = over_statics(by_workload(read_cells(RESULTS / folder), "serving"))
        rows += [[f"[{folder}](results/{folder})", *row] for row in found]
    return markdown(["run", "FlexQuant over", "kinds of requests", *RATIOS], rows)


def over_statics(measured: Measured) -> list[list[str]]:
    """Return a row for each static subject: the ratios over all kinds of requests, and their verdicts."""
    rows = []
    for static in STATIC:
        beside = [
            (subjects, policy)
            for subjects in measured.values()
            for policy in routed(subjects)
            if static in subjects
        ]
        cells = [over(beside, static, metric) for metric in RATIOS if beside]
        rows += [[f"`{static}`", str(len(beside)), *cells]] if beside else []
    return rows


def over(beside: Sequence[tuple[dict[str, Rounds], str]], static: str, metric: str) -> str:
    """Return the smallest and the largest ratio to a static subject, and how many comparisons say what."""
    get = METRICS[metric][0]
    found = [
        compare_beside(
            paired_ratios(subjects[policy], subjects[static], get), second_server(subjects, static, get)
        )
        for subjects, policy in beside
    ]
    faster, slower = (HIGHER, LOWER) if metric == "tokens/s" else (LOWER, HIGHER)
    kinds = {faster: "faster", slower: "slower", EQUAL: "equal", UNKNOWN: f"with {UNKNOWN}"}
    counts = Counter(comparison.verdict for comparison in found)
    words = [f"{counts[verdict]} {kind}" for verdict, kind in kinds.items() if counts[verdict]]
    if counts[EQUAL]:
        within = max(comparison.within for comparison in found if comparison.verdict == EQUAL)
        words[words.index(f"{counts[EQUAL]} equal")] += f" within {percent(within, math.ceil)}"
    ratios = [comparison.ratio for comparison in found]
    return f"{min(ratios):.2f} – {max(ratios):.2f}: {', '.join(words)}"


def medians(measured: Measured, name: str, policy: str) -> str:
    """Return the table of one metric: a column a subject, the best of each row in bold."""
    get, form = METRICS[name]
    statics = [s for s in STATIC if any(s in subjects for subjects in measured.values())]
    best = max if name == "tokens/s" else min
    rows = []
    for workload, subjects in measured.items():
        found = [statistics.median(map(get, subjects[s].values())) for s in (*statics, policy)]
        shown = [f"**{m:{form}}**" if m == best(found) else f"{m:{form}}" for m in found]
        rows.append([f"`{workload.name}`", *shown])
    return markdown([name, *statics, "FlexQuant"], rows)


def cpu_kernels() -> str:
    return kernels(RESULTS / "cpu-kernels-zen4")


def gpu_kernels() -> str:
    return kernels(SPEED_ON_GPU)


def kernels(folder: Path) -> str:
    """Return medians in microseconds of one linear layer, the fastest of each row in bold."""
    ((layer, outputs, inputs), by_tokens), *_ = kernel_results(read_cells(folder)).items()
    schemes = list(next(iter(by_tokens.values())))
    rows = []
    for tokens, found in by_tokens.items():
        times = {scheme: found[scheme]["microseconds"] for scheme in schemes}
        fastest = min(times, key=times.__getitem__)
        shown = [f"**{time:.0f}**" if scheme == fastest else f"{time:.0f}" for scheme, time in times.items()]
        rows.append([str(tokens), *shown])
    return f"`{layer}`, {inputs} to {outputs}, µs:\n\n" + markdown(["tokens", *schemes], rows)


def tuned() -> str:
    """Return the tuned policy over whichever static variant was the fastest."""
    rows: list[list[str]] = []
    together: list[Comparison] = []
    equal: list[Comparison] = []
    pairs: list[tuple[Comparison, Comparison]] = []
    for folder in ("tuned-smollm2-135m-cpu", "tuned-0.5b-cpu"):
        measured = by_workload(read_cells(RESULTS / folder), "serving")
        ((policy,),) = {tuple(routed(subjects)) for subjects in measured.values()}
        link = f"[{read_header(RESULTS / folder)['model']}](results/{folder})"
        rows += [[link, *row] for row in summary_rows(measured, policy)]
        for metric in (METRICS[name][0] for name in LATENCIES):
            together.append(summarise(measured, policy, metric).together)
            for subjects in measured.values():
                again = {static: second_server(subjects, static, metric) for static in STATICS}
                equal += map(compare, again.values())
                best = best_static(subjects, metric)
                ratios = paired_ratios(subjects[policy], subjects[best], metric)
                pairs.append((compare(ratios), compare_beside(ratios, again[best])))
    equal = [comparison for comparison in equal if comparison.verdict != UNKNOWN]
    apart = sum(comparison.verdict != EQUAL for comparison in equal)
    changed = sum(narrow.verdict != wide.verdict for narrow, wide in pairs)
    low, high = min(found.low for found in together), max(found.high for found in together)
    return (
        f"{markdown(['model', *SUMMARY], rows)}\n\nAll rounds together leave open ratios from {low:.2f} to "
        f"{high:.2f}. Of {len(equal)} comparisons of two servers of one variant over {FEWEST_ROUNDS} rounds, "
        f"{apart} leave 1 out, as 6 % should by chance; of the {len(pairs)} verdicts above "
        f"{changed or 'none'} would be another one, had the intervals not been widened by such differences."
    )


def one_server_or_two() -> str:
    """Return W8A8 over W4A16 at the 1.5 B shape, on a server each and on one that takes both in turns."""
    apart = by_workload(read_cells(RESULTS / "1.5b-two-servers"), "serving")
    together = read("1.5b-one-server.json")["cells"]
    rows = []
    for workload, subjects in apart.items():
        for metric in RATIOS:
            of_two = paired_ratios(subjects["w8a8"], subjects["w4a16-chosen"], METRICS[metric][0])
            of_one = ratios(together[workload.name], "w8a8", metric)
            rows.append([f"`{workload.name}`", metric, str(compare(of_two)), str(compare(of_one))])
    return markdown(["requests", "W8A8 over W4A16", "two servers", "one server"], rows)


BLOCKS = (
    speed,
    gpu_speed,
    gpu_ratios,
    gpu_kernels,
    avx512_small,
    avx512_speed,
    zen_speed,
    zen_together,
    cpu_ratios,
    cpu_kernels,
    tuned,
    one_server_or_two,
)
"""Functions, each of which returns the block of its name."""
