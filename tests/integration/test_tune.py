# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""`flexquant tune`: real engines timed, a policy that serves, a run that goes on after a stop."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from openai import OpenAI

from flexquant.cli import main
from flexquant.measuring.server import vllm_serve
from flexquant.policy.routes import build_route_table
from flexquant.policy.rules import load_policy
from tests import programs

pytestmark = pytest.mark.engine

FEW = ["--quick", "--max-batch", "4", "--max-tokens", "64"]
COMMITTED = Path(__file__).parents[2] / "benchmarks/results/tuning/smollm2-135m.yaml"
REQUESTS = 32
NOISY = "this machine is too noisy to decide"


def command(*arguments) -> list[str]:
    return [sys.executable, "-m", "flexquant", *map(str, arguments)]


def run(*arguments, status: int | None = 0) -> subprocess.CompletedProcess:
    return programs.run(command(*arguments), timeout=600, status=status)


class Tuned(NamedTuple):
    policy: Path
    unreachable: subprocess.CompletedProcess
    """The earlier run, whose objective no policy could meet."""
    done: subprocess.CompletedProcess


@pytest.fixture(scope="module")
def tuned(real_merged, tmp_path_factory) -> Tuned:
    """Tune again with more rounds while the machine is too noisy; the samples are kept from run to run."""
    output = tmp_path_factory.mktemp("tuned") / "policy.yaml"
    for rounds in (3, 9, 27):
        arguments = ["tune", real_merged, "--output", output, *FEW, "--rounds", rounds]
        unreachable = run(*arguments, "--slo", "ttft=0.001ms", status=None)
        done = run(*arguments, "--json", "--objective", "latency", status=None)
        if NOISY not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    return Tuned(output, unreachable, done)


def test_every_size_is_measured_and_written_down(tuned):
    output, _, done = tuned
    measured = load_policy(str(output)).measured
    assert set(measured.decode) == set(measured.prefill) == {"w8a8", "w4a16"}
    for variant in measured.variants:
        assert list(measured.decode[variant]) == [1, 4]
        assert list(measured.prefill[variant]) == [12, 40, 64]
    assert measured.origin["versions"]["vllm"]
    assert json.loads(done.stdout.splitlines()[-1])["measured"] == measured.to_data()
    assert f"wrote {output}" in done.stdout
    assert {file.suffix for file in output.parent.iterdir()} == {".yaml", ".png"}


def test_policy_show_draws_the_times_beside_the_plans(tuned, real_merged, capsys):
    output = tuned.policy
    assert main(["policy", "show", str(output), "--model", str(real_merged)]) == 0
    shown = capsys.readouterr().out
    policy = load_policy(str(output))
    table = build_route_table(policy, ["w8a8", "w4a16"], num_layers=30, max_tokens=64)
    assert f"measured: {real_merged.name}" in shown
    row = next(line for line in shown.splitlines() if line.startswith("4 sequences"))
    assert f"{1e3 * policy.measured.decode['w8a8'][4].median:.3g} (" in row
    assert row.split()[-1] == table.lookup("decode", 4).name


def test_this_cpu_is_predicted_as_it_was_measured(real_merged, capsys):
    """The device file was fitted to single kernels, and to decode passes of one sequence."""
    measured = ["--device", "cpu-2-core", "--measured", str(COMMITTED)]
    assert main(["predict", str(real_merged), *measured, "--json"]) == 0
    printed = capsys.readouterr().out
    assert "(measured on AMD EPYC, 2 cores, tensor-parallel size 1)" in printed
    errors = json.loads(printed.splitlines()[-1])["errors"]
    for phase in ("decode", "prefill"):
        for variant in ("w8a8", "w4a16"):
            assert abs(statistics.median(errors[phase][variant].values())) < 0.3


def served_passes(merged, policy, folder) -> list[dict]:
    """Serve the policy to REQUESTS requests of different lengths, all at once; return the traced passes."""
    trace = folder / "routes.jsonl"
    additional = json.dumps({"flexquant": {"policy": str(policy), "trace": str(trace)}})
    arguments = ["--additional-config", additional, "--enforce-eager", "--max-model-len", "256"]
    with vllm_serve(merged, *arguments, log=folder / "server.log") as url:
        client = OpenAI(base_url=url, api_key="none")

        def complete(number):
            client.completions.create(
                model=str(merged),
                prompt=list(range(10, 14 + 3 * number)),
                max_tokens=24 + 3 * number,
                temperature=0,
                extra_body={"ignore_eos": True},
            )

        complete(0)
        with ThreadPoolExecutor(REQUESTS) as pool:
            list(pool.map(complete, range(REQUESTS)))
    _, *passes = [json.loads(line) for line in trace.read_text().splitlines()]
    return passes


def check_routes(policy, passes) -> None:
    table = build_route_table(load_policy(str(policy)), ["w8a8", "w4a16"], num_layers=30, max_tokens=8192)
    for p in passes:
        assert p["plan"] == table.lookup(p["phase"], p["tokens"]).name, p
    decoded = {p["tokens"] for p in passes if p["phase"] == "decode"}
    assert min(decoded) == 1 and max(decoded) > 3 * REQUESTS // 4


@pytest.mark.full
def test_the_routes_that_a_server_takes_are_those_of_its_table(tuned, real_merged, tmp_path):
    check_routes(tuned.policy, served_passes(real_merged, tuned.policy, tmp_path))


@pytest.mark.full
def test_a_server_takes_both_sides_of_the_committed_crossovers(real_merged, tmp_path):
    """The committed policy has a crossover at about 20 sequences; the one tuned here may have none."""
    passes = served_passes(real_merged, COMMITTED, tmp_path)
    check_routes(COMMITTED, passes)
    for phases in ({"decode"}, {"prefill", "mixed"}):
        assert {p["plan"] for p in passes if p["phase"] in phases} == {"w8a8", "w4a16"}


@pytest.mark.full
def test_a_stopped_run_goes_on(tiny_merged, tmp_path):
    """The first run is stopped; a sample that it left is changed, and the second run writes the changed one.

    The runs have a single round, so that this sample is all there is of its size.
    """
    merged, output = tiny_merged() / "merged", tmp_path / "policy.yaml"
    samples = tmp_path / "policy.yaml.samples.json"
    few = ["--rounds", "1", "--max-batch", "16", "--max-tokens", "64"]
    arguments = ["tune", merged, "--output", output, *few]
    first = subprocess.Popen(
        command(*arguments),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore SIGINT, and so do their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
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
    run(*arguments)
    assert load_policy(str(output)).measured.decode["w8a8"][1].median == pytest.approx(1234.5, rel=1e-3)
    assert not samples.exists()


def test_another_objective_is_decided_without_engines(tuned):
    assert tuned.unreachable.returncode == 1
    assert "cannot be met" in tuned.unreachable.stderr
    assert "starting w8a8, w4a16" in tuned.unreachable.stderr
    assert "starting" not in tuned.done.stderr


def test_an_engine_that_does_not_start_is_named_with_its_log(tiny_merged, tmp_path):
    arguments = ["tune", tiny_merged() / "merged", "--output", tmp_path / "p.yaml", *FEW]
    done = run(*arguments, "--tensor-parallel-size", "3", status=1)
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
            "--max-quality-loss needs --text or --quality, one of them",
        ),
        (
            ["--output", "p.yaml", "--max-quality-loss", "0.1", "--text", "t", "--quality", "q"],
            "--max-quality-loss needs --text or --quality, one of them",
        ),
        (["--output", "p.yaml", "--reference", "m"], "--reference is what --text is measured against"),
        (["--output", "p.yaml", "--variants", "w8a8"], "there is nothing to choose from but w8a8"),
    ],
)
def test_wrong_use_costs_no_time(tiny_merged, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["tune", str(tiny_merged() / "merged"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_policy_is_not_overwritten_unasked(tiny_merged, tmp_path, capsys):
    (tmp_path / "p.yaml").write_text("mine")
    command = ["tune", tiny_merged() / "merged", "--output", tmp_path / "p.yaml", *FEW]
    assert main([str(part) for part in command]) == 2
    assert "exists; give another --output, or --overwrite" in capsys.readouterr().err
    assert (tmp_path / "p.yaml").read_text() == "mine"
