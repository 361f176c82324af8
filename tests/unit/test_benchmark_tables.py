# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The speed benchmarks' figures: kernels, tables and the report by hand, verdicts."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from benchmarks.speed import kernels, tables
from benchmarks.speed.comparing import compare_beside
from benchmarks.speed.report import write_report
from benchmarks.speed.results import ROOT, Results, read_lines
from benchmarks.speed.tables import by_workload, said
from benchmarks.speed.workloads import Workload
from flexquant.evaluation.comparison import EQUAL, HIGHER, compare

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

PARTS = {"serving": "## Latency", "start": "## Memory", "kernels": "## Kernels"}
BATCH = Workload(2, 100, 50)


def served(subject: str, number: int, workload: Workload = BATCH, **result: Any) -> dict[str, Any]:
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
    return {"part": "serving", "parameters": parameters, "result": whole}


def rows(table: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in table.splitlines()]


def test_prefill_ends_with_the_last_first_token_and_decode_follows_it():
    result = {"ttfts": [0.4, 0.9, 0.5], "tpots": [0.1, 0.025, 0.2]}
    assert tables.prefill_ms(result) == pytest.approx(900) and tables.decode_ms(result) == pytest.approx(25)


def test_latency_table_by_hand():
    cells = [served("w8a8", n, median_ttft_ms=ttft) for n, ttft in enumerate((100.0, 130.0, 110.0))]
    assert rows(tables.latency_table(by_workload(cells, "serving")))[2:] == [
        ["2x100+50", "`w8a8`", "110.0 (100.0 – 130.0)", "15.00 (15.00 – 15.00)"]
        + ["40.0 (40.0 – 40.0)", "80.0 (80.0 – 80.0)"]
    ]


def test_ratio_tables_pair_rounds_by_hand():
    cells = [
        served("w8a8", 0, median_ttft_ms=100.0, median_tpot_ms=10.0, output_throughput=50.0),
        served("w8a8", 1, median_ttft_ms=200.0, median_tpot_ms=10.0, output_throughput=50.0),
        served("flexquant:phase", 0, median_ttft_ms=110.0, median_tpot_ms=11.0, output_throughput=45.0),
        served("flexquant:phase", 1, median_ttft_ms=180.0, median_tpot_ms=12.0, output_throughput=55.0),
        # Not paired: no ratio comes from it.
        served("flexquant:phase", 2, median_ttft_ms=9999.0, median_tpot_ms=9999.0),
        # A constant policy is not compared.
        served("flexquant:w8a8", 0, median_ttft_ms=50.0, median_tpot_ms=5.0, output_throughput=100.0),
    ]
    assert rows(tables.ratio_table(by_workload(cells, "serving"))) == [
        ["requests", "ratio", "TTFT", "TPOT", "tokens/s", "rounds"],
        ["---"] * 6,
        # The estimate of two ratios is their geometric mean.
        ["2x100+50", "`flexquant:phase` / `w8a8`", "0.995 (0.900 – 1.100), too few rounds"]
        + ["1.149 (1.100 – 1.200), too few rounds", "0.995 (0.900 – 1.100), too few rounds", "2"],
    ]
    assert by_workload(cells, "start") == {}


def test_kernel_and_memory_tables_by_hand():
    times = {"microseconds": 12.5, "microseconds_quartiles": [12.25, 13.0]}
    found = {"kernel": "SomeKernel", **times, "gb_per_s": 1234.0, "tflop_per_s": 0.125}
    layer = {"layer": "o_proj", "outputs": 8, "inputs": 16}
    start = {"start_seconds": 61.4, "kv_cache_tokens": 117760, "kv_cache_gib": 1.0, "checkpoint_gib": 0.125}
    cells = [
        {"part": part, "parameters": parameters, "result": result}
        for part, parameters, result in (
            ("kernels", {**layer, "tokens": 16}, {"w8a8": found}),
            ("kernels", {**layer, "tokens": 2}, {"w8a8": found, "fp8": {"unavailable": "ValueError: no"}}),
            ("start", {"subject": "w8a8"}, start),
        )
    ]
    text = "12.5 µs (12.25 – 13), 1.23e+03 GB/s, 0.125 TFLOP/s"
    assert rows(tables.kernel_table(tables.kernel_results(cells)["o_proj", 8, 16])) == [
        ["tokens", "w8a8", "fp8"],
        ["---"] * 3,
        ["2", text, "no kernel"],
        ["16", text, "–"],
    ]
    (memory,) = rows(tables.memory_table(tables.start_results(cells)))[2:]
    assert memory == ["`w8a8`", "0.12", "1.00", "117,760", "61"]


def test_report_of_hand_made_cells(tmp_path):
    results = Results(tmp_path, "tiny", "abc123")
    for subject in ("w8a8", "flexquant:phase"):
        cell = served(subject, 0)
        results.save("serving", cell["parameters"], 2, result={**cell["result"], "duration": 1.0})
    results.save("start", {"subject": "fp8"}, 0, failure="GPUs only")
    assert write_report(tmp_path) == tmp_path / "report.md"
    report = (tmp_path / "report.md").read_text()
    assert report.startswith("# Speed of tiny\n")
    assert "- commit: abc123\n" in report and "- 3 cells, " in report and ", 4 s of measuring" in report
    assert "| 2x100+50 | `flexquant:phase` / `w8a8` | 1.000, too few rounds | 1.000, too" in report
    assert "## Not measured\n\n- start, fp8: GPUs only" in report
    assert {path.name for path in tmp_path.iterdir()} == {"cells.jsonl", "report.md"}


@pytest.mark.parametrize(
    "file", sorted((ROOT / "benchmarks/results").glob("*/cells.jsonl")), ids=lambda file: file.parent.name
)
def test_the_committed_cells_are_whole_and_make_the_report_that_git_does_not_keep(file, tmp_path, capsys):
    header, cells = read_lines(file.parent)
    assert capsys.readouterr().out == ""
    assert cells and all({"result", "failure"} & cell.keys() for cell in cells)
    assert {cell["parameters"]["model"] for cell in cells} == {header["model"]}
    shutil.copy(file, tmp_path)
    write_report(tmp_path)
    report = (tmp_path / "report.md").read_text()
    for part, title in PARTS.items():
        assert (title in report) == any(c["part"] == part and "result" in c for c in cells), part


# verdicts


@pytest.mark.parametrize(
    ("again", "found"),
    [([1.0, 0.9, 1.1], HIGHER), ([1.05], EQUAL), ([1 / 1.05], EQUAL), ([1.01], HIGHER), ([1 / 1.01], HIGHER)],
)
def test_servers_of_the_same_subject_widen_the_interval_by_their_ratio(again, found):
    ratios = [1.03, 1.1, 1.2, 1.06, 1.1]
    comparison = compare_beside(ratios, again)
    apart = max(compare(again).ratio, 1 / compare(again).ratio)
    assert (comparison.low, comparison.high) == pytest.approx((1.03 / apart, 1.2 * apart))
    assert comparison.ratio == compare(ratios).ratio and comparison.verdict == found


def test_more_tokens_a_second_are_faster():
    assert [said(compare([2.0] * 5), m) for m in ("TTFT ms", "tokens/s")] == ["100 % slower", "100 % faster"]
    assert [said(compare([0.5] * 5), m) for m in ("TTFT ms", "tokens/s")] == ["50 % faster", "50 % slower"]
    assert [said(compare([0.9, 1, 1, 1, 1.2][:n]), "tokens/s") for n in (5, 4)] == [
        "equal within 20 %",
        "too few rounds",
    ]
