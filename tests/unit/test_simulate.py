# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Replaying traces: what a policy gains, `flexquant simulate`, and a real server beside it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.arrivals import make_trace
from flexquant import cli
from flexquant.checkpoint.merged_config import MergedConfig, StoredVariant
from flexquant.errors import FlexQuantError
from flexquant.planning.model_shape import read_model_shape
from flexquant.planning.pass_cost import PassCost
from flexquant.planning.replaying import replay
from flexquant.planning.scheduler import Chunk, Sequence
from flexquant.planning.server import Limits, default_capture_sizes
from flexquant.planning.simulation_report import format_simulation_table, ratios_to_first, summarise_replay
from flexquant.planning.times import check_times, find_times, route_table
from flexquant.planning.trace import Request, write_trace
from flexquant.policy.rules import load_policy, parse_policy
from flexquant.policy.schema import SCHEMA
from tests.checkpoints import make_checkpoint
from tests.pass_times import CPU_LIMITS, CROSSED, make_times, run_trace

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


# policies


def test_the_right_variant_for_each_phase_beats_both() -> None:
    trace = make_trace(60, 5, 1, 40, 20, 0.5, seed=1)
    times = make_times(CROSSED)
    found = {
        name: summarise_replay(run_trace(trace, Limits(), name, times)) for name in ("w8a8", "w4a16", "phase")
    }
    for static in ("w8a8", "w4a16"):
        for key in ("mean_ttft_ms", "mean_tpot_ms"):
            assert found["phase"][key] < found[static][key]
    assert {(row["phase"], row["plan"]) for row in found["phase"]["passes"]} == {
        ("prefill", "w8a8"),
        ("mixed", "w8a8"),
        ("decode", "w4a16"),
    }
    ratios = ratios_to_first(found)
    assert set(ratios["w8a8"].values()) == {1.0}
    assert ratios["phase"]["mean_tpot_ms"] == pytest.approx(
        found["phase"]["mean_tpot_ms"] / found["w8a8"]["mean_tpot_ms"]
    )
    table = format_simulation_table(found)
    assert "relative to w8a8" in table and "time per plan" in table


def test_the_batch_size_decides_by_the_number_of_sequences() -> None:
    rules = [{"when": {"phase": "decode", "batch_size": {"max": 1}}, "use": "w4a16"}, {"use": "w8a8"}]
    policy = parse_policy({"schema": SCHEMA, "rules": rules})
    times, limits = make_times(CROSSED), Limits()
    trace = [Request(0, 5, 2), Request(0, 5, 3)]
    result = replay(trace, route_table(policy, times, limits), PassCost(times), limits)
    assert [(p.phase, p.plan) for p in result.passes] == [
        ("prefill", "w8a8"),
        ("decode", "w8a8"),
        ("decode", "w4a16"),
    ]


def test_the_slowest_of_a_hundred_decides_the_99th_percentile() -> None:
    found = summarise_replay(
        run_trace([Request(float(n), 1 + 999 * (n == 7), 1) for n in range(50)], Limits())
    )
    assert found["median_ttft_ms"] == pytest.approx(10)
    assert found["p99_ttft_ms"] == pytest.approx(10 + 990 * 0.51)


def test_layers_need_the_model_and_share_the_time() -> None:
    policy, times, limits = load_policy("phase-batch-layer"), make_times(CROSSED), Limits()
    with pytest.raises(FlexQuantError, match="names layers, but how many .* give .* with --model"):
        route_table(policy, times, limits)
    model = MergedConfig("LlamaForCausalLM", {name: StoredVariant(f"{name}.", {}) for name in CROSSED}), 10
    plan = route_table(policy, times, limits, model).lookup("decode", 1)
    assert plan.layers.count("w8a8") == 5
    batch = [Chunk(Sequence(Request(0, 1, 1)), 1, 1, True)]
    assert PassCost(times).seconds(plan, "decode", batch, 1) == pytest.approx(0.007)


def test_a_derived_variant_needs_times_of_its_own() -> None:
    policy = load_policy("phase-batch-w4a8")
    with pytest.raises(FlexQuantError, match="uses 'w4a8', but there are times for w8a8, w4a16 only"):
        check_times("phase-batch-w4a8", policy, make_times(CROSSED))
    times = make_times({**CROSSED, "w4a8": CROSSED["w8a8"]})
    check_times("phase-batch-w4a8", policy, times)
    table = route_table(policy, times, Limits())
    assert {v for plan in table.plans for v in plan.variants} == set(policy.variants)


# command line


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a policy file with the crossed times, and load only the one subcommand."""
    monkeypatch.setattr(cli, "SUBCOMMANDS", ("simulate",))
    document = {**load_policy("phase").document, "measured": make_times(CROSSED).to_data()}
    path = tmp_path / "tuned.yaml"
    path.write_text(json.dumps(document))  # JSON is YAML
    return str(path)


def command(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[list[str], dict[str, Any]]:
    assert cli.main(["simulate", *argv, "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    return lines, json.loads(last)


def test_cli_compares_policies(capsys: pytest.CaptureFixture[str], tuned: str) -> None:
    policies = ["--policy", "w8a8", "--policy", "w4a16", "--policy", tuned]
    lines, found = command(capsys, "--trace", "bursty", *policies)
    assert list(found["results"]) == ["w8a8", "w4a16", "tuned.yaml"]
    assert found["times"] == {"source": tuned, "origin": {"machine": "made up"}}
    assert found["trace"]["requests"] == 160
    assert found["limits"] == json.loads(json.dumps(dataclasses.asdict(Limits(*CPU_LIMITS))))
    assert found["relative_to_first"]["tuned.yaml"]["mean_tpot_ms"] < 1
    assert lines[0].startswith("bursty: 160 requests in 39.75 s, ")
    assert lines[1].startswith("limits: 2048 tokens and 128 sequences in a pass, ")
    assert [line.split()[0] for line in lines[4:7]] == ["w8a8", "w4a16", "tuned.yaml"]
    assert lines[7] == "relative to w8a8"
    assert lines[-1].startswith("tuned.yaml") and "w4a16" in lines[-1] and "prefill" in lines[-1]


def test_cli_speed_brings_requests_closer(capsys: pytest.CaptureFixture[str], tuned: str) -> None:
    arguments = ["--trace", "steady", "--policy", "w8a8", "--times", tuned]
    (_, once), (_, faster) = (command(capsys, *arguments, "--speed", speed) for speed in ("0.1", "4"))
    assert faster["trace"]["seconds"] == pytest.approx(once["trace"]["seconds"] / 40)
    assert faster["results"]["w8a8"]["mean_ttft_ms"] > once["results"]["w8a8"]["mean_ttft_ms"]


def test_cli_takes_the_times_and_the_policy_stored_in_the_model(
    capsys: pytest.CaptureFixture[str], tuned: str, tmp_path: Path
) -> None:
    variants = {name: StoredVariant(f"{name}.", {}) for name in CROSSED}
    config = MergedConfig("LlamaForCausalLM", variants, policy=load_policy(tuned).document)
    (tmp_path / "config.json").write_text(
        json.dumps({"num_hidden_layers": 6, "quantization_config": config.to_json()})
    )
    names = ("stored", "phase-batch-layer")
    policies = [part for name in names for part in ("--policy", name)]
    _, found = command(capsys, "--trace", "steady", *policies, "--model", str(tmp_path))
    assert found["times"]["source"] == "the checkpoint's policy"
    assert "w8a8+w4a16[4]" in found["results"]["phase-batch-layer"]["time_per_plan"]


@pytest.fixture
def merged(merged: Path) -> str:
    """Return the merged checkpoint as an argument of the command line."""
    return str(merged)


def test_cli_predicts_the_times_of_a_device(
    capsys: pytest.CaptureFixture[str], tuned: str, merged: str
) -> None:
    policies = ["--policy", "w8a8", "--policy", "w4a8"]
    _, found = command(capsys, "--trace", "steady", *policies, "--device", "h100", "--model", merged)
    assert found["times"]["source"] == found["times"]["origin"]["device"] == "h100"
    assert found["results"]["w4a8"]["time_per_plan"] == pytest.approx({"w4a8": 1})


def test_cli_predicts_one_copy(capsys: pytest.CaptureFixture[str], tuned: str, tmp_path: Path) -> None:
    model = str(make_checkpoint(tmp_path / "int4", scheme="w4a16"))
    policies = ["--policy", "w4a16", "--policy", "one-copy"]
    _, found = command(capsys, "--trace", "steady", *policies, "--device", "l20", "--model", model)
    assert set(found["results"]["one-copy"]["time_per_plan"]) == {"w4a16", "w8a8-from-int4"}
    less = found["kv_cache_tokens"]["w4a16"] - found["kv_cache_tokens"]["one-copy"]
    assert less == pytest.approx(512 * 128 / read_model_shape(model).kv_bytes_per_token, abs=1)


def test_cli_takes_the_kv_cache_that_the_loaded_variants_leave(
    capsys: pytest.CaptureFixture[str], tuned: str, merged: str
) -> None:
    arguments = ["--trace", "steady", "--device", "cpu-2-core", "--model", merged]
    lines, found = command(capsys, *arguments, "--policy", "w8a8", "--policy", "phase")
    shape = read_model_shape(merged)
    for name, variants in (("w8a8", ["w8a8"]), ("phase", ["w8a8", "w4a16"])):
        left = (0.9 * 23 - 1) * 2**30 - shape.bytes_of(variants)
        assert found["kv_cache_tokens"][name] == int(left / shape.kv_bytes_per_token)
    assert lines[2] == "KV cache: w8a8 {w8a8} tokens, phase {phase} tokens".format(**found["kv_cache_tokens"])
    _, found = command(capsys, *arguments, "--policy", "w8a8", "--tensor-parallel-size", "2")
    assert found["kv_cache_tokens"]["w8a8"] > 1.9 * (0.9 * 23 - 1) * 2**30 / shape.kv_bytes_per_token
    _, found = command(capsys, *arguments, "--policy", "w8a8", "--kv-cache-tokens", "4096")
    assert found["kv_cache_tokens"] == {"w8a8": 4096}


@pytest.mark.parametrize(
    ("device", "sizes", "expected"),
    [
        ("l4", [], list(default_capture_sizes(256, 2048))),
        ("h100", [], list(default_capture_sizes(1024, 8192))),
        ("l4", ["--capture-sizes", "none"], []),
        ("l4", ["--capture-sizes", "8,4,9000,4"], [4, 8]),
        ("cpu-2-core", [], []),
    ],
)
def test_cli_pads_passes_on_gpus(
    capsys: pytest.CaptureFixture[str],
    tuned: str,
    merged: str,
    tmp_path: Path,
    device: str,
    sizes: list[str],
    expected: list[int],
) -> None:
    (tmp_path / "one.jsonl").write_text(write_trace([Request(0, 5, 2)]))
    arguments = ["--trace", str(tmp_path / "one.jsonl"), "--policy", "w8a8", "--device", device]
    _, found = command(capsys, *arguments, "--model", merged, *sizes)
    assert found["limits"]["capture_sizes"] == expected


def test_cli_refuses_a_model_that_does_not_fit(tuned: str, merged: str, tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(write_trace([Request(0, 100_000_000, 1)]))
    arguments = ["--trace", str(tmp_path / "long.jsonl"), "--policy", "w8a8"]
    for device in ("l4", "cpu-2-core"):
        argv = ["simulate", *arguments, "--device", device, "--model", merged]
        args = cli.build_parser().parse_args(argv)
        with pytest.raises(FlexQuantError, match=rf"does not fit on {device}: .* \(w8a8\), "):
            args.run(args)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--policy", "w8a8"], "none of the policies w8a8 has measured times; measure .* 'flexquant tune'"),
        (["--policy", "w8a8", "--times", "phase"], "phase has no measured times"),
        (["--policy", "{tuned}", "--policy", "fp8-phase-batch"], "uses 'fp8', but there are times for w8a8"),
        (["--policy", "{tuned}", "--policy", "w5a5"], "unknown policy 'w5a5'.*variant .*w8a8, w4a16"),
        (["--policy", "{tuned}", "--policy", "phase-batch-layer"], "give the merged checkpoint with --model"),
        (["--policy", "{tuned}", "--kv-cache-tokens", "8"], "request 1 of the trace needs"),
        (["--policy", "{tuned}", "--policy", "/.{tuned}"], "two policies are named 'tuned.yaml'"),
        (["--policy", "{tuned}", "--model", "nowhere"], "no such folder: nowhere"),
        (["--policy", "w8a8", "--device", "h100"], "predicts the times of a model; give .* with --model"),
        (["--policy", "{tuned}", "--tensor-parallel-size", "2"], "is for predicted times, .* give --device"),
    ],
)
def test_cli_refuses(capsys: pytest.CaptureFixture[str], tuned: str, argv: list[str], problem: str) -> None:
    argv = [part.replace("{tuned}", tuned) for part in argv]
    with pytest.raises(FlexQuantError, match=problem):
        args = cli.build_parser().parse_args(["simulate", "--trace", "bursty", *argv])
        args.run(args)
    assert cli.main(["simulate", "--trace", "bursty", *argv]) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("flexquant simulate: error: ")


@pytest.mark.parametrize("speed", ["0", "-1", "inf", "nan", "fast"])
def test_cli_wrong_usage(capsys: pytest.CaptureFixture[str], tuned: str, speed: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--trace", "bursty", "--policy", tuned, "--speed", speed])
    assert f"'{speed}' is not a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize("sizes", ["", "0", "8;16", "all"])
def test_cli_wrong_capture_sizes(capsys: pytest.CaptureFixture[str], tuned: str, sizes: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--trace", "bursty", "--policy", tuned, "--capture-sizes", sizes])
    assert f"'{sizes}' is neither 'none' nor" in capsys.readouterr().err


def test_times_of_the_first_policy_that_has_some(tuned: str) -> None:
    assert find_times(["w8a8", "phase", tuned])[1] == tuned
    assert find_times(["w8a8"], given=tuned)[0].variants == ("w8a8", "w4a16")


# the check against a real server


def test_a_real_server_took_as_long_as_simulated() -> None:
    """In the committed rounds of benchmarks/simulation.py, means are within 20 % of the client's."""
    document = json.loads((RESULTS / "simulation-cpu.json").read_text())
    assert list(document["results"]) == ["phase-batch", "w8a8", "w4a16"]
    for rounds in document["results"].values():
        assert len(rounds) == 2
        for found in rounds:
            for key in ("mean_ttft_ms", "mean_tpot_ms", "output_throughput"):
                assert found["simulated"][key] == pytest.approx(found["measured"][key], rel=0.2)
