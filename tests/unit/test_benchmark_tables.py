# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The speed benchmarks' figures: kernels, tables and the report by hand, verdicts."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.speed.kernels import summarise
from benchmarks.speed.report import write_report
from benchmarks.speed.results import Results
from benchmarks.speed.tables import (
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
    start_results,
    verdict,
)
from benchmarks.speed.workloads import Workload

# kernels


def test_kernel_summary_by_hand():
    found = summarise([5e-6, 1e-6, 3e-6, 2e-6, 4e-6], weight_bytes=1000, outputs=10, inputs=20, tokens=5)
    # 1000 bytes of weights, 2 * 5 * 20 of inputs, 2 * 5 * 10 of outputs; 2 * 5 * 20 * 10 operations; in 3 us.
    assert found.pop("microseconds_quartiles") == pytest.approx([2, 4])
    assert found == pytest.approx(
        {"microseconds": 3, "rounds": 5, "gb_per_s": 1.3 / 3, "tflop_per_s": 2e-3 / 3}, rel=1e-9
    )


# tables

BATCH = Workload(2, 100, 50)


def served(
    subject: str, number: int, workload: Workload = BATCH, part: str = "serving", **result: Any
) -> dict[str, Any]:
    """A serving cell: the second request's prompt comes last."""
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
        "w8a8": {"weights_gib": 2.0, "kv_cache_gib": 1.0, "kv_cache_tokens": 1000},
        # As on a CPU: what FlexQuant says goes before the size on disk.
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
        ["2x100+50", "`flexquant:w8a8` / `w8a8`", "1.000 (0.900 – 1.100)", "1.150 (1.100 – 1.200)"]
        + ["1.000 (0.900 – 1.100)", "2"],
    ]
    assert rows(ratio_table(measured, constant=False)) == [
        *head,
        ["2x100+50", "`flexquant:phase` / `w8a8`", "0.250", "0.500", "2.000", "1"],
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
            "result": {"kernels": ["A", "B"], "start_seconds": 61.4, "kv_cache_tokens": 117760}
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
    assert rows(memory_table(start_results(cells)))[2:] == [
        ["`w8a8`", "0.12", "1.00", "–", "117,760", "61", "–", "–", "A, B"]
    ]


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
    assert "| 2x100+50 | `flexquant:w8a8` / `w8a8` | 1.000 | 1.000 | 1.000 | 1 |" in report
    assert "## Not measured\n\n- start, fp8: GPUs only" in report
    assert (tmp_path / "overhead.svg").is_file()


# verdicts


@pytest.mark.parametrize(
    ("ratios", "found"),
    [
        ([1.1, 1.2, 1.01], "slower"),
        ([0.9, 0.8, 0.99], "faster"),
        ([0.9, 1.2, 1.1], "within noise"),
        ([1.5], "too few rounds"),
    ],
)
def test_a_verdict_needs_all_rounds(ratios, found):
    assert verdict(ratios) == found


@pytest.mark.parametrize(
    ("ratios", "again", "found"),
    [
        ([1.1, 1.2, 1.01], [0.9, 1.0, 1.05], "slower"),
        ([1.1, 1.2, 1.01], [1.0, 1.0, 1.1], "within noise"),
        ([0.9, 0.8, 0.99], [0.95, 1.2, 1.1], "faster"),
        ([0.9, 0.8, 0.99], [0.85, 0.9, 0.8], "within noise"),
    ],
)
def test_what_two_servers_of_the_same_subject_differ_by_is_noise(ratios, again, found):
    assert verdict(ratios, again) == found


def test_the_best_static_variant_is_told_beside_its_second_server():
    def rounds(*milliseconds):
        return {n: {"median_ttft_ms": ms, "median_tpot_ms": ms} for n, ms in enumerate(milliseconds)}

    subjects = {
        "w8a8": rounds(30, 30, 30),
        "w4a16": rounds(10, 20, 10),
        "w4a16:again": rounds(11, 20, 12),
        "flexquant:mine": rounds(11, 21, 11),
    }
    (row,) = best_static_table({Workload(1, 16, 8): subjects}).splitlines()[2:]
    half = "`w4a16` | 1.100 (1.050 – 1.100) | 1.100 (1.000 – 1.200) | within noise"
    assert row == f"| 1x16+8 | `flexquant:mine` | {half} | {half} |"
