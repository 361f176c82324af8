# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Policies are compared on one live server: it takes them in turn, and each is timed under its own plan."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from examples.vllm_server import vllm_serve
from tests.integration.live_server import plugin_routes

pytestmark = pytest.mark.engine


@pytest.mark.full
def test_policies_take_turns_on_one_server(
    tiny_merged: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, output = tmp_path / "trace.jsonl", tmp_path / "live.json"
    options = json.dumps({"flexquant": {"policy": "phase", "trace": str(trace)}})
    arguments = ["--additional-config", options, "--enforce-eager", "--max-model-len", "256"]
    command = ["--policy", "w8a8", "--policy", "w4a16", "--serving", "2x16+4", "--rounds", "3"]
    with plugin_routes(), vllm_serve(tiny_merged() / "merged", *arguments) as url:
        assert main(["policies", url, *command, "--output", str(output)]) == 0
        printed = capsys.readouterr().out
        assert main(["policies", url, *command[:2], *command[4:], "--output", str(output)]) == 1
        assert "give --policy twice" in capsys.readouterr().err
        assert main(["policies", f"{url}/nowhere", *command, "--output", str(output)]) == 1
        assert "names no model" in capsys.readouterr().err
    cells = json.loads(output.read_text())["cells"]["2x16+4"]
    assert {name: len(rounds) for name, rounds in cells.items()} == {"w8a8": 3, "w4a16": 3}
    assert all(
        r["completed"] == 2 and r["total_output_tokens"] == 8 for found in cells.values() for r in found
    )
    assert "| 2x16+4 | `w4a16` |" in printed
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    plans = [line["plan"] for line in lines if line.get("phase") == "decode"]
    assert [plan for plan, _ in groupby(plans)] == ["w8a8", "w4a16", "w8a8", "w4a16"]
