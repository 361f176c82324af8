# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""For readme_tables: latencies and ratios of the committed speed runs, and their kernels."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.serving_tables import RESULTS
from benchmarks.speed.comparing import (
    Measured,
    Summary,
    best_static,
    compare_beside,
    paired_ratios,
    routed,
    second_server,
    summarise,
)
from benchmarks.speed.results import read_cells, read_header
from benchmarks.speed.subjects import STATIC
from benchmarks.speed.tables import (
    LATENCIES,
    METRICS,
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
)

SPEED = RESULTS / "smollm2-135m-cpu"
SPEED_ON_GPU = RESULTS / "llama-3.1-8b-h100"
SPEED_ON_AVX512 = RESULTS / "1.5b-avx512"
TUNED_ON_AVX512 = "flexquant:benchmarks/results/tuning/1.5b-avx512.yaml"
SPEED_ON_ZEN = RESULTS / "1.5b-zen4"
TUNED_ON_ZEN = "flexquant:benchmarks/results/tuning/1.5b-zen4.yaml"
STATICS = ("w8a8", "w4a16")
ROUTED = "flexquant:phase-batch"
SPEED_METRICS = ("TTFT ms", "TPOT ms", "tokens/s")


def speed(folder: Path = SPEED, statics: Sequence[str] = STATICS, policy: str = ROUTED) -> str:
    """Medians over rounds, of the static variants and of FlexQuant with its default policy."""
    rows = []
    for workload, subjects in by_workload(read_cells(folder), "serving").items():
        row = [f"`{workload.name}`"]
        for get, form in (METRICS[name] for name in SPEED_METRICS):
            medians = (statistics.median(map(get, subjects[s].values())) for s in (*statics, policy))
            row += [format(median, form) for median in medians]
        rows.append(row)
    header = [f"{name}: {subject}" for name in SPEED_METRICS for subject in (*statics, "FlexQuant")]
    return markdown(["requests", *header], rows)


def speed_ratios() -> str:
    """FlexQuant over each static variant where requests come as a stream, and over the best of them."""
    measured = by_workload(read_cells(SPEED), "serving")
    (stream,) = (subjects for workload, subjects in measured.items() if workload.rate is not None)

    def against(static: str, name: str) -> str:
        found = compare(paired_ratios(stream[ROUTED], stream[static], METRICS[name][0]))
        return f"{found.ratio:.2f} ({found.low:.2f} to {found.high:.2f}, {said(found, name)})"

    tpot, ttft = ([against(static, name) for static in STATICS] for name in ("TPOT ms", "TTFT ms"))
    ttft_found, tpot_found = (summarise(measured, ROUTED, METRICS[metric][0]) for metric in LATENCIES)

    def against_best(found: Summary) -> str:
        ratios = [comparison.ratio for comparison in found.workloads]
        return (
            f"{min(ratios):.2f} to {max(ratios):.2f} times (of {len(ratios)} rows faster in "
            f"{found.count(LOWER)}, slower in {found.count(HIGHER)}, equal in {found.equal()})"
        )

    return (
        f"Under the stream its time per output token is {tpot[0]} times that of static W8A8, {tpot[1]} times "
        f"that of static W4A16, and its time to first token {ttft[0]} and {ttft[1]} times theirs: cheap "
        "prefills hold up decoding less. No second server of a variant ran, so how far equal servers differ "
        "is not in these intervals. Against the faster static variant of each row its time to first "
        f"token is {against_best(ttft_found)}, its time per output token {against_best(tpot_found)}."
    )


def gpu_speed() -> str:
    return speed(SPEED_ON_GPU)


def gpu_ratios() -> str:
    """FlexQuant over each static variant; and with one plan for everything, over that variant."""
    cells = read_cells(SPEED_ON_GPU)
    tables = [ratio_table(by_workload(cells, "serving"), constant=False)]
    tables.append(ratio_table(by_workload(cells, "overhead"), constant=True))
    return "\n\n".join(tables)


def avx512_speed() -> str:
    return speed(SPEED_ON_AVX512, ("w8a8", "w4a16-chosen"), TUNED_ON_AVX512)


def avx512_ratios() -> str:
    return ratio_table(by_workload(read_cells(SPEED_ON_AVX512), "serving"), constant=False)


def zen_speed() -> str:
    return speed(SPEED_ON_ZEN, ("w8a8",), TUNED_ON_ZEN)


def zen_ratios() -> str:
    """FlexQuant over static W8A8 by kind of requests, and over all of them together."""
    measured = by_workload(read_cells(SPEED_ON_ZEN), "serving")
    together = {name: summarise(measured, TUNED_ON_ZEN, METRICS[name][0]).together for name in LATENCIES}
    words = " and ".join(
        f"{name.removesuffix(' ms')} is {found.ratio:.3f} ({found.low:.3f} – {found.high:.3f}) times that of "
        f"static W8A8 ({said(found, name)})"
        for name, found in together.items()
    )
    return f"{ratio_table(measured, constant=False)}\n\nOver all of these its {words}."


def zen_w4a8() -> str:
    return ratio_table(by_workload(read_cells(RESULTS / "1.5b-zen4-w4a8"), "serving"), constant=False)


def zen_again() -> str:
    """Another policy, tuned on another day, against static W8A8."""
    return ratio_table(by_workload(read_cells(RESULTS / "1.5b-zen4-again"), "serving"), constant=False)


def avx512_small() -> str:
    return all_subjects(RESULTS / "smollm2-135m-avx512")


def avx512_stock() -> str:
    """FlexQuant over the static variants, W4A16 on vLLM's own kernel; and one plan over its own."""
    cells = read_cells(RESULTS / "smollm2-135m-avx512-stock")
    tables = [ratio_table(by_workload(cells, "serving"), constant=False)]
    tables.append(ratio_table(by_workload(cells, "overhead"), constant=True))
    return "\n\n".join(tables)


def avx512_half() -> str:
    """Of the 0.5 B shape: the policy that tune found there over each static variant."""
    return ratio_table(by_workload(read_cells(RESULTS / "0.5b-avx512"), "serving"), constant=False)


def avx512_half_stock() -> str:
    """Of the 0.5 B shape: that policy beside 16 bit and W4A16 on vLLM's own kernel."""
    return all_subjects(RESULTS / "0.5b-avx512-stock")


def avx512_large_stock() -> str:
    """Of the 1.5 B shape: the tuned policy over 16 bit and W4A16 on vLLM's own kernel."""
    return ratio_table(by_workload(read_cells(RESULTS / "1.5b-avx512-stock"), "serving"), constant=False)


def zen_half() -> str:
    """Of the 0.5 B shape: a policy of three variants beside static W8A8 and W4A8, on AMD's kernels."""
    return all_subjects(RESULTS / "0.5b-zen4")


def all_subjects(folder: Path) -> str:
    """Medians by metric; the tuned policy over the best static subject; streams against every one."""
    measured = by_workload(read_cells(folder), "serving")
    (policy,) = dict.fromkeys(subject for subjects in measured.values() for subject in routed(subjects))
    streams = {workload: found for workload, found in measured.items() if workload.rate is not None}
    return "\n\n".join(
        [
            *(medians(measured, name, policy) for name in SPEED_METRICS),
            against_best(measured, policy),
            ratio_table(streams, constant=False),
        ]
    )


def medians(measured: Measured, name: str, policy: str) -> str:
    """One metric, a column a subject, the best of each row in bold."""
    get, form = METRICS[name]
    statics = [s for s in STATIC if any(s in subjects for subjects in measured.values())]
    best = max if name == "tokens/s" else min
    rows = []
    for workload, subjects in measured.items():
        found = [statistics.median(map(get, subjects[s].values())) for s in (*statics, policy)]
        shown = [f"**{m:{form}}**" if m == best(found) else f"{m:{form}}" for m in found]
        rows.append([f"`{workload.name}`", *shown])
    return markdown([name, *statics, "FlexQuant"], rows)


def against_best(measured: Measured, policy: str) -> str:
    """The policy over the static subject with the smallest median, for each latency."""
    rows = []
    for workload, subjects in measured.items():
        row = [f"`{workload.name}`"]
        for name in LATENCIES:
            get = METRICS[name][0]
            best = best_static(subjects, get)
            found = compare_beside(
                paired_ratios(subjects[policy], subjects[best], get), second_server(subjects, best, get)
            )
            row += [f"`{best}`", f"{found}, {said(found, name)}"]
        rows.append(row)
    header = [
        text for name in LATENCIES for text in (f"best {name.removesuffix(' ms')}", "FlexQuant over it")
    ]
    return markdown(["requests", *header], rows)


def cpu_kernels() -> str:
    return kernels(RESULTS / "cpu-kernels-zen4")


def gpu_kernels() -> str:
    return kernels(SPEED_ON_GPU)


def kernels(folder: Path) -> str:
    """Medians in microseconds of one linear layer, the fastest of each row in bold."""
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
    """The tuned policy against whichever static variant was the fastest."""
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


BLOCKS = (
    speed,
    speed_ratios,
    gpu_speed,
    gpu_ratios,
    gpu_kernels,
    avx512_speed,
    avx512_ratios,
    zen_speed,
    zen_ratios,
    zen_w4a8,
    zen_again,
    avx512_small,
    avx512_stock,
    avx512_half,
    avx512_half_stock,
    avx512_large_stock,
    zen_half,
    cpu_kernels,
    tuned,
)
"""Each writes the block of its name."""
