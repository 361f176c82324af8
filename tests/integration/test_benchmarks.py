# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The speed benchmarks end to end, as small as they go: measure, report, and measure nothing again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks import own_cost
from benchmarks.speed.results import read_cells
from benchmarks.speed.shapes import SHAPES
from flexquant.evaluation.comparison import Effort
from flexquant.evaluation.engine import describe_machine, describe_versions
from tests import programs

pytestmark = [pytest.mark.engine, pytest.mark.full]

COMMIT = "0123456789ab"
SUBJECTS = ["w8a8", "flexquant:phase"]
OPTIONS = [
    *("--quick", "--eager", "--model", "tiny", "--parts", "kernels,serving"),
    *("--subjects", ",".join(SUBJECTS), "--serving", "2x8+4", "--rounds", "1"),
    *("--layers", "o_proj", "--schemes", "bf16,w8a8", "--tokens", "4", "--seconds", "0.01"),
    *("--kv-cache-gib", "1", "--commit", COMMIT),
]


@dataclass
class Run:
    output: Path
    work: Path
    stdout: str = ""

    def start(self) -> None:
        command = [sys.executable, "-m", "benchmarks", "run", *OPTIONS]
        command += ["--output", self.output, "--work", self.work]
        environment = programs.newcomers_environment()
        self.stdout = programs.run(command, timeout=1200, environment=environment).stdout

    def cells(self, part: str) -> list[dict[str, Any]]:
        return [cell for cell in read_cells(self.output) if cell["part"] == part]

    def by_subject(self, part: str) -> dict[str, dict[str, Any]]:
        return {cell["parameters"]["subject"]: cell for cell in self.cells(part)}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("benchmarks")
    run = Run(folder / "results", folder / "work")
    run.start()
    yield run


def test_every_cell_says_where_it_comes_from(run):
    cells = [cell for part in ("kernels", "start", "serving") for cell in run.cells(part)]
    assert len(cells) == 1 + 2 * len(SUBJECTS)
    given = [Path(option).name if option.startswith("/") else option for option in OPTIONS]
    for cell in cells:
        assert cell["machine"] == describe_machine()
        assert cell["versions"] == describe_versions()
        assert {"flexquant", "torch", "transformers"} < cell["versions"].keys()
        assert cell["commit"] == COMMIT
        assert cell["argv"][:4] == ["python", "-m", "benchmarks", "run"]
        assert cell["argv"][4:] == [*given, "--output", "results", "--work", "work"]
        assert cell["seconds"] > 0
        assert "failure" not in cell, cell["failure"]


def test_kernels_are_timed(run):
    (cell,) = run.cells("kernels")
    expected = {"layer": "o_proj", "outputs": 128, "inputs": 128, "tokens": 4}
    assert expected.items() <= cell["parameters"].items()
    assert list(cell["result"]) == ["bf16", "w8a8"]
    for found in cell["result"].values():
        assert found["kernel"]
        low, high = found["microseconds_quartiles"]
        assert 0 < low <= found["microseconds"] <= high
        assert found["rounds"] >= 5
        assert min(found["gb_per_s"], found["tflop_per_s"]) > 0
    assert cell["result"]["bf16"]["weight_bytes"] == 2 * 128 * 128
    assert cell["result"]["w8a8"]["kernel"].endswith("Kernel")


def test_every_subject_answers_the_same_requests_in_full(run):
    requests, tokens = 2, 4
    cells = run.by_subject("serving")
    assert set(cells) == set(SUBJECTS)
    for cell in cells.values():
        result = cell["result"]
        assert result["completed"] == requests
        assert result["output_lens"] == [tokens] * requests
        assert result["total_input_tokens"] == 8 * requests
        assert len(result["ttfts"]) == len(result["tpots"]) == requests
        numbers = [*result["ttfts"], *result["tpots"], result["duration"]]
        numbers += [result[f"median_{name}_ms"] for name in ("ttft", "tpot", "itl")]
        assert min(*numbers, result["output_throughput"]) > 0
        assert result["side_by_side"] == SUBJECTS


def test_servers_tell_memory_and_start(run):
    cells = run.by_subject("start")
    assert set(cells) == set(SUBJECTS)
    for cell in cells.values():
        result = cell["result"]
        assert result["kv_cache_gib"] == 1
        assert min(result[name] for name in ("kv_cache_tokens", "checkpoint_gib", "start_seconds")) > 0
        tokens = result["kv_cache_blocks"] * result["kv_cache_block_size"]
        assert tokens * SHAPES["tiny"].kv_bytes_per_token == pytest.approx(2**30, rel=0.01)
    static, flexquant = (cells[name]["result"] for name in SUBJECTS)
    assert static["kv_cache_tokens"] == flexquant["kv_cache_tokens"]
    assert flexquant["flexquant"].startswith("policy phase; ")
    assert flexquant["variant_gib"]["w8a8"] > 0
    assert "flexquant" not in static


def test_report_names_machine_versions_and_commit(run):
    report = (run.output / "report.md").read_text()
    machine = describe_machine()
    assert f"{machine['cpu']}, {machine['cores']} cores" in report
    for name, version in describe_versions().items():
        assert f"{name} {version}" in report
    assert f"- commit: {COMMIT}\n" in report
    assert "## Not measured" not in report
    for row in (
        "| 2x8+4 | `w8a8` | ",
        "| 2x8+4 | `flexquant:phase` / `w8a8` | ",
        "### o_proj, 128 to 128",
    ):
        assert row in report


def test_same_command_measures_nothing_again(run):
    cells = run.output / "cells.jsonl"
    before = cells.stat().st_mtime_ns, cells.read_bytes()
    report = (run.output / "report.md").read_text()
    run.start()
    assert "kernels: 1 of 1 cells are there already" in run.stdout
    assert f"serving: {len(SUBJECTS)} of {len(SUBJECTS)} cells are there already" in run.stdout
    assert (cells.stat().st_mtime_ns, cells.read_bytes()) == before
    assert (run.output / "report.md").read_text() == report


def test_a_round_of_own_cost_has_times_with_and_without_flexquant(tiny_merged):
    found = own_cost.measure(tiny_merged("llama") / "merged", "w4a16", Effort(1, 1, 1.0))
    (on,), (off,) = found["on_seconds"], found["off_seconds"]
    assert found["ratio"] == pytest.approx(on / off, rel=1e-3)
