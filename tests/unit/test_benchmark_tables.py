# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The speed benchmarks' figures: kernels, tables and the report by hand, verdicts."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from benchmarks.serving_tables import RESULTS
from benchmarks.speed import kernels
from benchmarks.speed.comparing import Rounds, compare_beside, summarise
from benchmarks.speed.report import write_report
from benchmarks.speed.results import Results, read_cells
from benchmarks.speed.tables import (
    METRICS,
    batch_table,
    best_static_table,
    by_workload,
    decode_ms,
    kernel_results,
    kernel_table,
    latency_table,
    memory_table,
    prefill_ms,
    ratio_table,
    said,
    start_results,
    summary_table,
)
from benchmarks.speed.workloads import Workload
from benchmarks.speed_tables import over_statics
from flexquant.measuring.comparison import EQUAL, HIGHER, compare

# kernels


def test_kernel_summary_by_hand():
    found = kernels.summarise(
        [5e-6, 1e-6, 3e-6, 2e-6, 4e-6], weight_bytes=1000, outputs=10, inputs=20, tokens=5
    )
    # 1000 bytes of weights, 2 * 5 * 20 of inputs, 2 * 5 * 10 of outputs; 2 * 5 * 20 * 10 operations; in 3 us.
    assert found.pop("microseconds_quartiles") == pytest.approx([2, 4])
    assert found == pytest.approx(
        {"microseconds": 3, "rounds": 5, "gb_per_s": 1.3 / 3, "tflop_per_s": 2e-3 / 3}, rel=1e-9
    )


# tables

PARTS = {"serving": "## Latency", "overhead": "## Overhead", "start": "## Memory", "kernels": "## Kernels"}
BATCH = Workload(2, 100, 50)


def served(
    subject: str, number: int, workload: Workload = BATCH, part: str = "serving", **result: Any
) -> dict[str, Any]:
    """Return a serving cell in which the second request's prompt comes last."""
    whole = {
        "ttfts": [0.1, 0.3],
        "tpots": [0.02, 0.01],
        "median_ttft_ms": 200.0,
        "median_tpot_ms": 15.0,
        "p99_itl_ms": 40.0,
        "output_throughput": 80.0,
        **result,
    }
    parameters = {"subject": subject, "workload": workload.describe(), "round": number}
    return {"part": part, "parameters": parameters, "result": whole}


def rows(table: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in table.splitlines()]


def test_prefill_ends_with_the_last_first_token_and_decode_follows_it():
    result = {"ttfts": [0.4, 0.9, 0.5], "tpots": [0.1, 0.025, 0.2]}
    assert prefill_ms(result) == pytest.approx(900)
    assert decode_ms(result) == pytest.approx(25)


def test_batch_table_by_hand():
    cells = [
        served("w8a8", 0),
        served("w8a8", 1, ttfts=[0.5, 0.1], tpots=[0.03, 0.01], output_throughput=60.0),
        served("flexquant:w8a8", 0),
        served("w4a16", 0),
        served("w8a8", 0, Workload(9, 100, 50, rate=1.0)),
        {"part": "serving", "parameters": {"subject": "bf16"}, "failure": "it broke"},
    ]
    memory = {
        "w8a8": {"checkpoint_gib": 2.0, "kv_cache_gib": 1.0, "kv_cache_tokens": 1000},
        # What FlexQuant says goes before the size on disk.
        "flexquant:w8a8": {
            "variant_gib": {"w8a8": 2.5, "shared": 0.5},
            "checkpoint_gib": 9.0,
            "kv_cache_gib": 2.0,
            "kv_cache_tokens": 1000,
        },
    }
    assert rows(batch_table(by_workload(cells, "serving"), memory)) == [
        ["batch", "input", "output", "subject", "prefill ms", "decode ms", "tokens/s", "GiB"],
        ["---"] * 8,
        # Prefill 300 and 500, decode 10 and 30; 2 GiB and 300 tokens of 1/1000 GiB.
        ["2", "100", "50", "`w8a8`", "400.0 (300.0 – 500.0)", "20.00 (10.00 – 30.00)"]
        + ["70.0 (60.0 – 80.0)", "2.30"],
        ["2", "100", "50", "`flexquant:w8a8`", "300.0", "10.00", "80.0", "3.60"],
        ["2", "100", "50", "`w4a16`", "300.0", "10.00", "80.0", "–"],
    ]


def test_latency_table_by_hand():
    cells = [served("w8a8", n, median_ttft_ms=ttft) for n, ttft in enumerate((100.0, 130.0, 110.0))]
    assert rows(latency_table(by_workload(cells, "serving")))[2:] == [
        ["2x100+50", "`w8a8`", "110.0 (100.0 – 130.0)", "15.00 (15.00 – 15.00)"]
        + ["40.0 (40.0 – 40.0)", "80.0 (80.0 – 80.0)"]
    ]


def test_ratio_tables_pair_rounds_by_hand():
    cells = [
        served("w8a8", 0, median_ttft_ms=100.0, median_tpot_ms=10.0, output_throughput=50.0),
        served("w8a8", 1, median_ttft_ms=200.0, median_tpot_ms=10.0, output_throughput=50.0),
        served("flexquant:w8a8", 0, median_ttft_ms=110.0, median_tpot_ms=11.0, output_throughput=45.0),
        served("flexquant:w8a8", 1, median_ttft_ms=180.0, median_tpot_ms=12.0, output_throughput=55.0),
        # Not paired: no ratio comes from it.
        served("flexquant:w8a8", 2, median_ttft_ms=9999.0, median_tpot_ms=9999.0),
        served("flexquant:phase", 1, median_ttft_ms=50.0, median_tpot_ms=5.0, output_throughput=100.0),
    ]
    measured = by_workload(cells, "serving")
    head = [["requests", "ratio", "TTFT", "TPOT", "tokens/s", "rounds"], ["---"] * 6]
    assert rows(ratio_table(measured, constant=True)) == [
        *head,
        # The estimate of two ratios is their geometric mean.
        ["2x100+50", "`flexquant:w8a8` / `w8a8`", "0.995 (0.900 – 1.100), too few rounds"]
        + ["1.149 (1.100 – 1.200), too few rounds", "0.995 (0.900 – 1.100), too few rounds", "2"],
    ]
    assert rows(ratio_table(measured, constant=False)) == [
        *head,
        ["2x100+50", "`flexquant:phase` / `w8a8`"]
        + [f"{ratio}, too few rounds" for ratio in ("0.250", "0.500", "2.000")]
        + ["1"],
    ]
    assert by_workload(cells, "overhead") == {}


def test_kernel_and_memory_tables_by_hand():
    times = {"microseconds": 12.5, "microseconds_quartiles": [12.25, 13.0]}
    found = {"kernel": "SomeKernel", **times, "gb_per_s": 1234.0, "tflop_per_s": 0.125}
    parameters = {"layer": "o_proj", "outputs": 8, "inputs": 16, "tokens": 16}
    cells = [
        {"part": "kernels", "parameters": parameters, "result": {"w8a8": found}},
        {
            "part": "kernels",
            "parameters": {**parameters, "tokens": 2},
            "result": {"w8a8": found, "fp8": {"unavailable": "ValueError: no"}},
        },
        {
            "part": "start",
            "parameters": {"subject": "w8a8"},
            "result": {"start_seconds": 61.4, "kv_cache_tokens": 117760}
            | {"kv_cache_gib": 1.0, "checkpoint_gib": 0.125},
        },
    ]
    text = "12.5 µs (12.25 – 13), 1.23e+03 GB/s, 0.125 TFLOP/s"
    assert rows(kernel_table(kernel_results(cells)["o_proj", 8, 16])) == [
        ["tokens", "w8a8", "fp8"],
        ["---"] * 3,
        ["2", text, "no kernel"],
        ["16", text, "–"],
    ]
    assert rows(memory_table(start_results(cells)))[2:] == [["`w8a8`", "0.12", "1.00", "117,760", "61"]]


def test_report_of_hand_made_cells(tmp_path):
    results = Results(tmp_path, "tiny", "abc123")
    for subject in ("w8a8", "flexquant:w8a8"):
        cell = served(subject, 0, part="overhead")
        results.save("overhead", cell["parameters"], 2, result=cell["result"])
    results.save("start", {"subject": "fp8"}, 0, failure="GPUs only")
    assert write_report(tmp_path) == ["report.md", "overhead.png"]
    report = (tmp_path / "report.md").read_text()
    assert report.startswith("# Speed of tiny\n")
    assert "- commit: abc123\n" in report
    assert "- 3 cells, " in report and ", 4 s of measuring" in report
    assert "| 2x100+50 | `flexquant:w8a8` / `w8a8` | 1.000, too few rounds | 1.000, too" in report
    assert "## Not measured\n\n- start, fp8: GPUs only" in report
    assert {path.name for path in tmp_path.iterdir()} == {"cells.jsonl", "report.md", "overhead.png"}


@pytest.mark.parametrize("cells", sorted(RESULTS.glob("*/cells.jsonl")), ids=lambda file: file.parent.name)
def test_the_committed_cells_make_the_report_that_git_does_not_keep(cells, tmp_path):
    shutil.copy(cells, tmp_path)
    write_report(tmp_path)
    report = (tmp_path / "report.md").read_text()
    for part, title in PARTS.items():
        measured = any(cell["part"] == part and "result" in cell for cell in read_cells(tmp_path))
        assert (title in report) == measured, part


# verdicts


def server(*milliseconds: float) -> Rounds:
    return {n: {"median_ttft_ms": ms, "median_tpot_ms": ms} for n, ms in enumerate(milliseconds)}


@pytest.mark.parametrize(
    ("again", "found"),
    [([1.0, 0.9, 1.1], HIGHER), ([1.05], EQUAL), ([1 / 1.05], EQUAL), ([1.01], HIGHER), ([1 / 1.01], HIGHER)],
)
def test_servers_of_the_same_subject_widen_the_interval_by_their_ratio(again, found):
    ratios = [1.03, 1.1, 1.2, 1.06, 1.1]
    comparison = compare_beside(ratios, again)
    apart = max(compare(again).ratio, 1 / compare(again).ratio)
    assert (comparison.low, comparison.high) == pytest.approx((1.03 / apart, 1.2 * apart))
    assert comparison.ratio == compare(ratios).ratio
    assert comparison.verdict == found


def test_more_tokens_a_second_are_faster():
    assert [said(compare([2.0] * 5), m) for m in ("TTFT ms", "tokens/s")] == ["100 % slower", "100 % faster"]
    assert [said(compare([0.5] * 5), m) for m in ("TTFT ms", "tokens/s")] == ["50 % faster", "50 % slower"]
    assert [said(compare([0.9, 1, 1, 1, 1.2][:n]), "tokens/s") for n in (5, 4)] == [
        "equal within 20 %",
        "too few rounds",
    ]


def test_the_best_static_variant_is_told_beside_its_second_server():
    subjects = {
        "w8a8": server(30, 30, 30, 30, 30),
        "w4a16": server(10, 20, 10, 10, 10),
        "w4a16:again": server(11, 22, 11, 11, 11),
        "flexquant:mine": server(13, 26, 13, 13, 13),
    }
    (row,) = rows(best_static_table({Workload(1, 16, 8): subjects}))[2:]
    half = ["`w4a16`", "1.300 (1.182 – 1.430), 30 % slower", "1.100 (1.100 – 1.100)"]
    assert row == ["1x16+8", "`flexquant:mine`", *half, *half]


def test_runs_are_summed_up_by_the_static_subject_by_hand():
    times = {16: (80,) * 5, 32: (90, 100, 125, 100, 100), 64: (110,) * 5, 128: (100, 100)}
    measured = {
        Workload(1, length, 8): {
            "w8a8": {n: {**rounds, "output_throughput": 4.0} for n, rounds in server(*[100] * 5).items()},
            "flexquant:mine": {n: {**r, "output_throughput": 8.0} for n, r in server(*milliseconds).items()},
        }
        for length, milliseconds in times.items()
    }
    latency = "0.80 – 1.10: 1 faster, 1 slower, 1 equal within 25 %, 1 with too few rounds"
    faster = "2.00 – 2.00: 3 faster, 1 with too few rounds"
    assert over_statics(measured) == [["`w8a8`", "4", latency, latency, faster]]


def test_all_rounds_together_tell_what_single_comparisons_cannot():
    """One round of five is faster for each workload, by chance; of all twenty rounds sixteen are slower."""
    milliseconds = (110, 95, 110, 110, 110)
    measured = {
        Workload(1, length, 8): {"w8a8": server(*[100] * 5), "flexquant:mine": server(*milliseconds)}
        for length in (16, 32, 64, 128)
    }
    found = summarise(measured, "flexquant:mine", METRICS["TTFT ms"][0])
    assert [comparison.verdict for comparison in found.workloads] == [EQUAL] * 4
    assert (found.count(EQUAL), found.count(HIGHER), found.again) == (4, 0, None)
    assert (found.together.rounds, found.together.verdict) == (20, HIGHER)
    # 210 pairs have 136 means of 1.1, 64 of the root of 1.1 * 0.95, 10 of 0.95; the lowest 52 are left out.
    together = "1.100 (1.022 – 1.100), 10 % slower"
    row = ["TTFT", "4", "0", "4, within 10 %", "0", "1.10 – 1.10", "0.95 – 1.10", together, "–"]
    assert rows(summary_table(measured))[2:] == [
        ["`flexquant:mine`", *row],
        ["`flexquant:mine`", "TPOT", *row[1:]],
    ]


def test_a_summary_tells_how_near_to_equal_its_comparisons_are():
    times = {16: (99, 100, 100, 100, 101), 32: (100, 100, 125, 90, 100), 64: (80, 80, 80, 80, 80)}
    measured = {
        Workload(1, length, 8): {"w8a8": server(*[100] * 5), "flexquant:mine": server(*milliseconds)}
        for length, milliseconds in times.items()
    }
    assert rows(summary_table(measured))[2][2:6] == ["3", "1", "2, within 1.0 % to 25 %", "0"]
