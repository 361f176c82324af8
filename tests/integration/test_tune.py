# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""`flexquant tune`: real engines timed, a policy that serves, a run that goes on after a stop."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from flexquant.policy import PHASES, load_policy
from flexquant.routes import build_route_table
from tests.integration.conftest import answers, engine

pytestmark = pytest.mark.engine

FEW = ["--quick", "--max-batch", "4", "--max-tokens", "32"]
NOISY = "this machine is too noisy to decide"


def command(*arguments) -> list[str]:
    return [sys.executable, "-m", "flexquant", *map(str, arguments)]


def run(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=600)


def tune(folder, output, *arguments) -> subprocess.CompletedProcess:
    """Tune with more rounds while the machine is too noisy; the samples are kept from run to run."""
    for rounds in (3, 9, 27):
        done = run("tune", folder, "--output", output, *FEW, "--rounds", rounds, *arguments)
        if NOISY not in done.stderr:
            break
    return done


@pytest.fixture(scope="module")
def tuned(real_merged, tmp_path_factory):
    output = tmp_path_factory.mktemp("tuned") / "policy.yaml"
    done = tune(real_merged, output, "--json", "--objective", "latency")
    assert done.returncode == 0, done.stderr
    return output, done


def test_every_size_is_measured_and_written_down(tuned):
    output, done = tuned
    measured = load_policy(str(output)).measured
    assert set(measured.decode) == set(measured.prefill) == {"w8a8", "w4a16"}
    for variant in measured.variants:
        assert list(measured.decode[variant]) == [1, 3, 4]
        assert list(measured.prefill[variant]) == [16, 32]
    assert measured.origin["versions"]["vllm"]
    assert json.loads(done.stdout.splitlines()[-1])["measured"] == measured.to_data()
    assert f"wrote {output}" in done.stdout
    assert {file.suffix for file in output.parent.iterdir()} == {".yaml", ".png", ".svg"}


def test_policy_show_draws_the_times_beside_the_plans(tuned, real_merged):
    output, _ = tuned
    shown = run("policy", "show", output, "--model", real_merged)
    table = load_policy(str(output)).measured
    assert f"measured: {real_merged.name}" in shown.stdout
    row = next(line for line in shown.stdout.splitlines() if line.startswith("4 sequences"))
    assert f"{1e3 * table.decode['w8a8'][4].median:.3g} (" in row
    assert row.split()[-1] in ("w8a8", "w4a16")


def test_the_routes_taken_are_those_of_its_table(tuned, real_merged, tmp_path):
    """Prompts that are prefilled alone and together, then decoded in batches of 1 to 4."""
    output, _ = tuned
    policy = load_policy(str(output))
    table = build_route_table(policy, ["w8a8", "w4a16"], 30, max_tokens=8192, max_sequences=8)
    trace = tmp_path / "trace.jsonl"
    with engine(real_merged, str(output), max_num_seqs=8, flexquant={"trace": str(trace)}) as llm:
        for count in (1, 2, 3, 4):
            prompts = [{"prompt_token_ids": list(range(10, 10 + 8 * (n + 1)))} for n in range(count)]
            answers(llm, prompts, ignore_eos=True, max_tokens=4)
    _, *passes = [json.loads(line) for line in trace.read_text().splitlines()]
    seen = {(p["phase"], p["tokens"]) for p in passes}
    assert {("decode", n) for n in (1, 2, 3, 4)} <= seen
    assert {phase for phase, _ in seen} <= set(PHASES)
    for p in passes:
        assert p["plan"] == table.lookup(p["phase"], p["tokens"]).name


def test_a_stopped_run_goes_on(tiny_merged, tmp_path):
    """The first run is stopped; a sample that it left is changed, and is what the second run writes.

    Of a single round, so that this sample is all there is of its size.
    """
    merged, output = tiny_merged() / "merged", tmp_path / "policy.yaml"
    samples = tmp_path / "policy.yaml.samples.json"
    first = subprocess.Popen(
        command("tune", merged, "--output", output, "--rounds", "1"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 300
    while not samples.is_file() and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 1, errors
    assert "flexquant tune: interrupted" in errors
    assert not output.exists()

    data = json.loads(samples.read_text())
    data["seconds"]["w8a8"]["decode"]["1"] = [1234.5]
    samples.write_text(json.dumps(data))
    done = run("tune", merged, "--output", output, "--rounds", "1")
    assert done.returncode == 0, done.stderr
    assert load_policy(str(output)).measured.decode["w8a8"][1].median == pytest.approx(1234.5, rel=1e-3)
    assert not samples.exists()


def test_an_engine_that_does_not_start_is_named_with_its_log(tiny_merged, tmp_path):
    done = run(
        "tune", tiny_merged() / "merged", "--output", tmp_path / "p.yaml", *FEW, "--tensor-parallel-size", "3"
    )
    assert done.returncode == 1
    assert "flexquant tune: error: the engine of 'w8a8' failed" in done.stderr
    assert "its log ends:" in done.stderr
    assert not (tmp_path / "p.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "p.json"], "end its name in .yaml"),
        (["--output", "missing/p.yaml"], "the folder of missing/p.yaml does not exist"),
        (["--output", "p.yaml", "--slo", "ttft=soon"], "'ttft=soon' in --slo is not a bound"),
        (
            ["--output", "p.yaml", "--max-quality-loss", "0.1"],
            "--max-quality-loss and --quality need each other",
        ),
        (["--output", "p.yaml", "--variants", "w8a8"], "there is nothing to choose from but w8a8"),
    ],
)
def test_wrong_use_costs_no_time(tiny_merged, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    done = run("tune", tiny_merged() / "merged", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_policy_is_not_overwritten_unasked(tiny_merged, tmp_path):
    (tmp_path / "p.yaml").write_text("mine")
    done = run("tune", tiny_merged() / "merged", "--output", tmp_path / "p.yaml", *FEW)
    assert "exists; give another --output, or --overwrite" in done.stderr
    assert (tmp_path / "p.yaml").read_text() == "mine"
