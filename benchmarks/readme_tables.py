# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Write the numbers of the README pages from the committed results: each stands between two comments.

python -m benchmarks.readme_tables           # write them
python -m benchmarks.readme_tables --check   # fail if they are not what the results say
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving_tables import RESULTS, disaggregated, generation, own_cost, read, watching
from benchmarks.speed.comparing import (
    Summary,
    best_static,
    compare_beside,
    paired_ratios,
    routed,
    second_server,
    summarise,
)
from benchmarks.speed.results import read_cells, read_header
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

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "examples/disaggregated", "merge", "flexquant/evaluation", "flexquant/quantization")
PAGES = [ROOT / folder / "README.md" for folder in FOLDERS]
BLOCK = re.compile(r"(<!-- from results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

METHODS = {
    "w8a8": "W8A8: SmoothQuant searched per layer + GPTQ (default)",
    "w8a8-alpha06": "W8A8: SmoothQuant 0.6 + GPTQ",
    "w8a8-alpha05": "W8A8: SmoothQuant 0.5 + GPTQ",
    "w4a16": "W4A16: GPTQ on normalised tokens, importance-weighted scales (default)",
    "w4a16-norm2": "the same, scales searched by squared error",
    "w4a16-g32": "the same, groups of 32",
    "w4a16-spared-16bit": "the same, the most sensitive 5 % of weights in 16 bit",
    "w4a16-spared-w8a8": "the same, the most sensitive 5 % of weights in W8A8",
    "w4a16-gptq-imatrix": "W4A16: GPTQ, importance-weighted scales",
    "w4a16-gptq": "W4A16: GPTQ as llm-compressor does it",
    "w4a16-awq": "W4A16: AWQ without v → o, rounding to nearest",
    "w4a16-rtn-mse": "W4A16: rounding to nearest, scales clipped by MSE",
    "w4a16-rtn": "W4A16: rounding to nearest",
}


def quality_cells(result: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    quality = result["quality"]
    change = quality["perplexity"] / reference["quality"]["perplexity"] - 1
    kl = "–" if quality["mean_kl"] is None else f"{quality['mean_kl']:.4f} ± {quality['mean_kl_error']:.4f}"
    top = "–" if quality["top1_agreement"] is None else f"{quality['top1_agreement']:.1%}"
    return [f"{quality['perplexity']:.2f}", "–" if result is reference else f"{change:+.1%}", kl, top]


def policies() -> str:
    document = read("quality/quality.json")
    reference, *results = document["results"]
    rows = []
    for result in [reference, *(r for r in results if not same_policy(r))]:
        name = f"`{result['policy']}`" if result is not reference else "16 bit"
        answers = result.get("answers")
        size = result["bytes_per_weight"]
        rows.append(
            [
                name,
                str(result["batch_size"]),
                *quality_cells(result, reference),
                f"{answers['identical']}/{answers['questions']}" if answers else "–",
                f"{size['resident']:.2f}",
                f"{size['decode']:.2f}",
            ]
        )
    header = ["policy", "batch", "perplexity", "change", "KL to 16 bit (nats)", "same top token"]
    return markdown([*header, "same answers", "bytes/weight held", "read in decode"], rows)


def same_policy(result: dict[str, Any]) -> bool:
    """Whether a row only repeats the same policy at another batch size."""
    return (result.get("same_as") or {}).get("policy") == result["policy"]


def methods() -> str:
    reference, *results = read("quality-methods/quality.json")["results"]
    found = {result["policy"]: result for result in results}
    rows = [["16 bit", *quality_cells(reference, reference), "2.00"]]
    for name, text in METHODS.items():
        size = found[name]["bytes_per_weight"]["decode"]
        rows.append([text, *quality_cells(found[name], reference), f"{size:.2f}"])
    header = ["how", "perplexity", "change", "KL to 16 bit (nats)", "same top token", "bytes/weight"]
    return markdown(header, rows)


def smoothing() -> str:
    found = read("smoothing.json")["smoothing"]
    ratios, best = found["ratios_to_per_mapping"], found["best_single_alpha"]
    summed, relative = ratios["summed_mse"], ratios["relative_mse"]
    return (
        f"Searching SmoothQuant's strength for each of {len(found['mappings'])} mappings leaves "
        f"{summed['all_0.5']:.2f} times less output MSE, summed over the layers, than 0.5 everywhere, "
        f"{summed['best_single']:.2f} times less than the best single strength ({best}) "
        f"and {summed['none']:.2f} times less than no smoothing; relative to each layer's output "
        f"{relative['all_0.5']:.2f}, {relative['best_single']:.2f} and {relative['none']:.2f} times."
    )


def merging() -> str:
    found = read("merge.json")
    verifying = ""
    if "verify_to_read" in found:
        verifying = (
            f". `flexquant verify` took {found['verify_to_read']:.1f} times as long as reading the files "
            f"from the disk, and {found['verify_to_read_cached']:.1f} times where they were in memory"
        )
    merge, alone = found["merge_to_cp"], found["merge_without_comparing_to_cp"]
    synced = merge / found["merge_to_cp_and_sync"]
    return (
        f"Merging {found['input_bytes'] / 1e9:.1f} GB on two CPU cores took {merge:.1f} times as long as "
        f"`cp -r` of the same bytes ({alone:.1f} times without comparing the weights; `cp -r` and `sync` "
        "together took "
        f"{synced:.1f} times as long), and at most "
        f"{found['peak_rss_above_interpreter_bytes'] / 1e6:.0f} MB of memory{verifying}"
    )


def merging_memory() -> str:
    found = read("merge.json")
    return (
        f"Merging {found['input_bytes'] / 1e9:.1f} GB took at most "
        f"{found['peak_rss_above_interpreter_bytes'] / 1e6:.0f} MB of memory, PyTorch included "
        "([measured](../benchmarks/README.md#merging)); a larger model takes no more."
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
        link = f"[{read_header(RESULTS / folder)['model']}](results/{folder}/report.md)"
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


def simulated() -> str:
    """Means over the rounds of a real server, and of the simulation of the requests that it got."""
    rows = []
    for policy, rounds in read("simulation-cpu.json")["results"].items():
        row = [f"`{policy}`"]
        for key, form in (("mean_ttft_ms", ".0f"), ("mean_tpot_ms", ".1f"), ("output_throughput", ".1f")):
            real, replayed = (
                statistics.fmean(r[kind][key] for r in rounds) for kind in ("measured", "simulated")
            )
            row.append(f"{real:{form}} / {replayed:{form}} ({replayed / real - 1:+.0%})")
        rows.append(row)
    return markdown(["policy", "mean TTFT ms: served / simulated", "mean TPOT ms", "tokens/s"], rows)


def main() -> int:
    functions = (policies, methods, smoothing, merging, merging_memory, speed, speed_ratios, tuned, simulated)
    machines = (gpu_speed, gpu_ratios, gpu_kernels, avx512_speed, avx512_ratios, zen_speed, zen_ratios)
    servers = (cpu_kernels, own_cost, watching, disaggregated, generation)
    blocks = {f.__name__: f for f in (*functions, *machines, *servers)}
    wrong = False
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        written = BLOCK.sub(lambda match: f"{match[1]}{blocks[match[2]]()}\n{match[3]}", text)
        wrong |= written != text
        if "--check" not in sys.argv[1:]:
            page.write_text(written, encoding="utf-8")
    return int(wrong and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
