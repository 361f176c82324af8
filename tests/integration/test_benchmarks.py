# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The benchmarks end to end, as small as they go: measure, report, and measure nothing again.

The speed benchmarks, with llama.cpp and OpenVINO GenAI if `.venv/peers` is there, policies in turns on one
live server, and `python -m benchmarks prove` in miniature, so that it works the first time that someone has
a GPU.
"""

import json
import sys
import urllib.request
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.platforms import current_platform

from benchmarks import own_cost
from benchmarks.__main__ import main
from benchmarks.proof.live import GROUPS
from benchmarks.proof.outcomes import SKIPPED, read_outcomes
from benchmarks.proof.proving import STEPS
from benchmarks.proof.report import PROOF, read_found
from benchmarks.proof.steps import DONE, read_steps
from benchmarks.speed.peers import ENVIRONMENT, PeerServer, make_gguf
from benchmarks.speed.results import read_cells
from benchmarks.speed.servers import ServerOptions
from benchmarks.speed.shapes import SHAPES, Shape
from benchmarks.speed.subjects import PEERS, parse_subject
from examples.vllm_server import vllm_serve
from flexquant.evaluation.comparison import Effort
from flexquant.evaluation.engine import describe_machine, describe_versions
from tests import programs
from tests.integration.conftest import records_of
from tests.integration.live_server import flexquant_options, plugin_routes

pytestmark = [pytest.mark.engine, pytest.mark.full]

COMMIT = "0123456789ab"
SUBJECTS = ["w8a8", "flexquant:phase"]
OPTIONS = [
    *("--quick", "--eager", "--model", "tiny", "--parts", "kernels,serving"),
    *("--subjects", ",".join(SUBJECTS), "--serving", "2x8+4", "--rounds", "1"),
    *("--layers", "o_proj", "--schemes", "bf16,w8a8", "--tokens", "4", "--seconds", "0.01"),
    *("--kv-cache-gib", "1", "--commit", COMMIT),
]


class Run(NamedTuple):
    output: Path
    start: Callable[[], str]
    """Run the command; return what it prints."""

    def cells(self, part: str) -> list[dict[str, Any]]:
        return [cell for cell in read_cells(self.output) if cell["part"] == part]

    def by_subject(self, part: str) -> dict[str, dict[str, Any]]:
        found = {cell["parameters"]["subject"]: cell["result"] for cell in self.cells(part)}
        assert set(found) == set(SUBJECTS)
        return found


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("benchmarks")
    command = [sys.executable, "-m", "benchmarks", "run", *OPTIONS]
    command += ["--output", str(folder / "results"), "--work", str(folder / "work")]

    def start() -> str:
        return programs.run(command, timeout=1200, environment=programs.newcomers_environment()).stdout

    start()
    return Run(folder / "results", start)


def test_every_cell_says_where_it_comes_from(run):
    cells = [cell for part in ("kernels", "start", "serving") for cell in run.cells(part)]
    assert len(cells) == 1 + 2 * len(SUBJECTS)
    given = [Path(option).name if option.startswith("/") else option for option in OPTIONS]
    command, versions = ["python", "-m", "benchmarks", "run", *given], describe_versions()
    assert {"flexquant", "torch", "transformers"} < versions.keys()
    for cell in cells:
        assert "failure" not in cell, cell["failure"]
        found = (cell["machine"], cell["versions"], cell["commit"])
        assert found == (describe_machine(), versions, COMMIT) and cell["seconds"] > 0
        assert cell["argv"] == [*command, "--output", "results", "--work", "work"]


def test_kernels_are_timed(run):
    (cell,) = run.cells("kernels")
    expected = {"layer": "o_proj", "outputs": 128, "inputs": 128, "tokens": 4}
    assert expected.items() <= cell["parameters"].items()
    assert list(cell["result"]) == ["bf16", "w8a8"]
    for found in cell["result"].values():
        low, high = found["microseconds_quartiles"]
        assert 0 < low <= found["microseconds"] <= high
        assert found["rounds"] >= 5 and found["kernel"]
        assert min(found["gb_per_s"], found["tflop_per_s"]) > 0
    assert cell["result"]["bf16"]["weight_bytes"] == 2 * 128 * 128
    assert cell["result"]["w8a8"]["kernel"].endswith("Kernel")


def test_every_subject_answers_the_same_requests_in_full(run):
    requests, tokens = 2, 4
    for result in run.by_subject("serving").values():
        assert (result["completed"], result["total_input_tokens"]) == (requests, 8 * requests)
        assert result["output_lens"] == [tokens] * requests
        assert len(result["ttfts"]) == len(result["tpots"]) == requests
        numbers = [*result["ttfts"], *result["tpots"], result["duration"]]
        numbers += [result[f"median_{name}_ms"] for name in ("ttft", "tpot", "itl")]
        assert min(*numbers, result["output_throughput"]) > 0
        assert result["side_by_side"] == SUBJECTS


def test_servers_tell_memory_and_start(run):
    results = run.by_subject("start")
    for result in results.values():
        assert result["kv_cache_gib"] == 1
        assert min(result[name] for name in ("kv_cache_tokens", "checkpoint_gib", "start_seconds")) > 0
        tokens = result["kv_cache_blocks"] * result["kv_cache_block_size"]
        assert tokens * SHAPES["tiny"].kv_bytes_per_token == pytest.approx(2**30, rel=0.01)
    static, flexquant = (results[name] for name in SUBJECTS)
    assert static["kv_cache_tokens"] == flexquant["kv_cache_tokens"]
    assert flexquant["flexquant"].startswith("policy phase; ") and "flexquant" not in static
    assert flexquant["variant_gib"]["w8a8"] > 0


def test_report_names_machine_versions_and_commit(run):
    report = (run.output / "report.md").read_text()
    machine = describe_machine()
    expected = [f"{machine['cpu']}, {machine['cores']} cores", f"- commit: {COMMIT}\n"]
    expected += [f"{name} {version}" for name, version in describe_versions().items()]
    expected += ["| 2x8+4 | `w8a8` | ", "| 2x8+4 | `flexquant:phase` / `w8a8` | ", "### o_proj, 128 to 128"]
    assert [text for text in expected if text not in report] == []
    assert "## Not measured" not in report


def test_same_command_measures_nothing_again(run):
    files = [run.output / name for name in ("cells.jsonl", "report.md")]
    before = files[0].stat().st_mtime_ns, [file.read_bytes() for file in files]
    printed = run.start()
    assert "kernels: 1 of 1 cells are there already" in printed
    assert f"serving: {len(SUBJECTS)} of {len(SUBJECTS)} cells are there already" in printed
    assert (files[0].stat().st_mtime_ns, [file.read_bytes() for file in files]) == before


def test_a_round_of_own_cost_has_times_with_and_without_flexquant(tiny_merged):
    found = own_cost.measure(tiny_merged("llama") / "merged", "w4a16", Effort(1, 1, 1.0))
    (on,), (off,) = found["on_seconds"], found["off_seconds"]
    assert found["ratio"] == pytest.approx(on / off, rel=1e-3)


def test_policies_take_turns_on_one_server(tiny_merged, tmp_path, capsys):
    trace, output = tmp_path / "trace.jsonl", tmp_path / "live.json"
    arguments = flexquant_options(policy="phase", trace=str(trace))
    arguments += ["--enforce-eager", "--max-model-len", "256"]
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
    done = {(r["completed"], r["total_output_tokens"]) for found in cells.values() for r in found}
    assert done == {(2, 8)}
    assert "| 2x16+4 | `w4a16` |" in printed
    plans = [record["plan"] for record in records_of(trace) if record.get("phase") == "decode"]
    assert [plan for plan, _ in groupby(plans)] == ["w8a8", "w4a16", "w8a8", "w4a16"]


@pytest.mark.skipif(not current_platform.is_cpu(), reason="on a GPU a proof takes half an hour")
def test_a_proof_takes_all_steps_and_says_what_was_not_shown(tmp_path: Path) -> None:
    output = tmp_path / "proof"
    command = [sys.executable, "-m", "benchmarks", "prove", "tiny", "--minutes", "20"]
    command += ["--commit", "0123456789ab", "--output", output, "--work", tmp_path / "work"]
    done = programs.run(command, timeout=1500, environment=programs.newcomers_environment())
    outcomes = read_outcomes(output / "tests.jsonl")
    assert outcomes and {outcome["outcome"] for outcome in outcomes.values()} == {SKIPPED}
    beside_the_server = {test for test in outcomes if "test_one_copy.py" in test}
    others = outcomes.keys() - beside_the_server
    assert beside_the_server and {outcomes[test]["reason"] for test in others} == {"needs an NVIDIA GPU"}
    cells = read_cells(output)
    assert not [cell["failure"] for cell in cells if "failure" in cell]
    subjects = {cell["parameters"]["subject"] for cell in cells if cell["part"] == "serving"}
    assert subjects == {"w8a8", "w8a8:again", "flexquant:phase-batch"}
    kernels = [cell["result"] for cell in cells if cell["part"] == "kernels"]
    assert [set(result) for result in kernels] == [
        {"w8a8", "w4a16", "one-copy", "nested", "w4a16@TorchCPUInt4LinearKernel"},
        {"bf16", "w8a16"},
        {"bf16", "w4a8"},
    ]
    steps = read_steps(output)
    assert [step.name for step in STEPS] == list(steps)
    assert {step["state"] for step in steps.values()} == {DONE}
    # No CPU has FP8 activations, so W4A8 gave way.
    with_w4a8, without = steps["policies at a large shape"]["note"].split("; tiny: ")
    assert ", w4a8-fp8, phase-batch, failed: " in with_w4a8
    assert without.endswith("w8a8, w4a16, one-copy, phase-batch, eager")
    assert not (output / GROUPS).exists()
    proof = (output / PROOF).read_text()
    assert proof in done.stdout
    assert "\n! kernel     w4a16: " in proof or "\n  kernel     w4a16: " in proof
    claims = [line for line in proof.splitlines() if line.startswith("| ") and "**" in line]
    assert claims and all("**not shown**" in claim for claim in claims)
    found, of_live = read_found(output), ["w8a8", "w4a16", "one-copy", "phase-batch"]
    prompts = {runner: list(of_runner) for runner, of_runner in found.first_tokens.items()}
    assert prompts == dict.fromkeys(("V2", "V1"), ["12 tokens"])
    for cells_of, policies in ((found.live, of_live), (found.rival, of_live[:2])):
        assert [list(of_policies) for of_policies in cells_of.values()] == [policies] * 2
        assert {len(rounds) for of_policies in cells_of.values() for rounds in of_policies.values()} == {1}
    assert len(found.large) == 1
    measured = [claim for claim in claims if "not measured" not in claim and "not run" not in claim]
    assert sum("too few rounds" in claim for claim in measured) == 13
    again = programs.run(command, timeout=300, environment=programs.newcomers_environment())
    assert "== " not in again.stdout, "everything is done already"


needs_peers = pytest.mark.skipif(
    not (ENVIRONMENT / ".done").is_file(), reason="`make .venv/peers/.done` makes them"
)
PROMPT = "The capital of France is"
TOKENS = 12


@pytest.fixture(scope="module")
def continuation(real_model: Path) -> str:
    """Return the greedy continuation of the prompt by transformers, in fp32."""
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    model = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    answer = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)
    return tokenizer.decode(answer[0, ids.shape[1] :])


@needs_peers
@pytest.mark.parametrize("peer", PEERS)
def test_peers_continue_a_text_as_the_16_bit_weights_do(peer, continuation, real_model, tmp_path):
    subject = parse_subject(f"{peer}:F16")
    shape = Shape.from_config(json.loads((real_model / "config.json").read_text()))
    options = ServerOptions(256, 2, eager=True, kv_cache_gib=1, memory_share=1, threads=1)
    file = make_gguf(real_model, subject, tmp_path)
    server = PeerServer(subject, real_model, file, shape, options, tmp_path / "log")
    try:
        assert server.wait_until_ready(300)["process_gib"] > 0.2
        ids = AutoTokenizer.from_pretrained(real_model)(PROMPT).input_ids
        asked = {"prompt": ids, "max_tokens": TOKENS, "temperature": 0, "stream": True}
        url, body = f"{server.url}/v1/completions", json.dumps(asked).encode()
        with urllib.request.urlopen(urllib.request.Request(url, body)) as reply:
            lines = reply.read().decode().replace("data: ", "").split("\n\n")
    finally:
        server.stop()
    choices = [json.loads(line)["choices"] for line in lines if line.startswith("{")]
    assert "".join(found[0]["text"] for found in choices if found) == continuation


@needs_peers
def test_peers_answer_the_same_requests_in_full(tmp_path: Path) -> None:
    subjects = [f"{peer}:{name}" for peer in PEERS for name in ("Q4_0", "Q8_0")]
    command = ["run", "--model", "tiny", "--parts", "serving", "--subjects", ",".join(subjects)]
    command += ["--serving", "3x40+8", "--rounds", "1", "--max-rounds", "1", "--kv-cache-gib", "1"]
    assert main([*command, "--output", str(tmp_path / "results"), "--work", str(tmp_path / "work")]) == 0
    served = [cell for cell in read_cells(tmp_path / "results") if cell["part"] == "serving"]
    cells = {cell["parameters"]["subject"]: cell for cell in served}
    assert list(cells) == subjects
    for cell in cells.values():
        assert cell["result"]["total_input_tokens"] == 120
        assert cell["result"]["output_lens"] == [8, 8, 8]
        assert "-" in cell["parameters"]["peer"]
