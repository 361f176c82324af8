# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Predicted pass times, the fastest variants and the requests that fit, and `flexquant predict`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from flexquant import cli
from flexquant.errors import FlexQuantError
from flexquant.planning.device import Device, builtin_devices, load_device
from flexquant.planning.linears import Linear, plain_linear
from flexquant.planning.model_shape import read_model_shape
from flexquant.planning.predicting import (
    MAX_SIZE,
    Winner,
    errors,
    fastest_by_size,
    hardware_table,
    kv_cache_tokens,
    main_scheme,
    max_requests,
)
from flexquant.planning.prediction_report import (
    collapse,
    describe_origin,
    format_prediction,
    report_prediction,
)
from flexquant.planning.roofline import pass_cost
from flexquant.policy.pass_times import Time
from flexquant.policy.rules import load_policy
from tests.checkpoints import make_checkpoint
from tests.prediction import predict_pass_times, run_predict


def test_context_is_paid_in_decoding(merged: Path, device: Device) -> None:
    model = read_model_shape(merged)
    times = predict_pass_times(merged, device, context=100)
    short, long = (pass_cost(model, "w8a8", "decode", 8, context, device).seconds for context in (100, 300))
    assert times.decode["w8a8"][8].median == short
    assert long - short == pytest.approx(8 * 200 * times.context_seconds)
    assert times.context_seconds == pytest.approx(model.kv_bytes_per_token / 50e9)


def test_fastest_changes_where_times_cross(merged: Path, device: Device) -> None:
    model = read_model_shape(merged)
    winners = fastest_by_size(model, "prefill", 1, device)
    assert (winners[0].first, winners[-1].last) == (1, MAX_SIZE)
    for before, after in zip(winners, winners[1:], strict=False):
        assert after.first == before.last + 1
        for size, best, other in (
            (before.last, before.variant, after.variant),
            (after.first, after.variant, before.variant),
        ):
            a, b = (pass_cost(model, v, "prefill", size, 1, device).seconds for v in (best, other))
            assert a <= b


def test_variants_in_turn_are_collapsed() -> None:
    turns = [Winner(v, i, i) for i, v in enumerate("abab", 1)]
    assert collapse(turns) == [Winner("a", 1, 1), Winner("either", 2, 3), Winner("b", 4, 4)]
    assert collapse(turns[:3]) == turns[:3]  # nothing is gained
    longer = [Winner(v, i, i) for i, v in enumerate("cababacac", 1)]
    assert [(w.variant, w.first, w.last) for w in collapse(longer, 3)] == [
        ("c", 1, 1),
        ("a", 2, 2),
        ("a or b", 3, 5),
        ("a", 6, 6),
        ("a or c", 7, 8),
        ("c", 9, 9),
    ]


def test_fastest_decode_ends_at_the_requests_that_fit(merged: Path, device: Device) -> None:
    report = report_prediction(read_model_shape(merged), device, 20_000, 4_000, 0.9)
    assert report.max_requests < MAX_SIZE
    assert report.fastest["decode"][-1].last == report.max_requests
    assert report.fastest["prefill"][-1].last == MAX_SIZE
    made = dataclasses.replace(
        report,
        fastest={
            "decode": [Winner("w4a16", 1, 11), Winner("w8a8", 12, 50)],
            "prefill": [
                Winner("w4a16", 1, 54),
                Winner("w8a8", 55, 64),
                Winner("w4a16", 65, 140),
                Winner("w8a8", 141, MAX_SIZE),
            ],
        },
    )
    text = format_prediction(made)
    assert "fastest decode by sequences, up to the 50 that fit: w4a16 1-11, w8a8 from 12\n" in text
    assert text.endswith("fastest prefill by tokens: w4a16 1-54, either 55-140, w8a8 from 141")


def test_requests_that_fit(merged: Path, device: Device) -> None:
    model = read_model_shape(merged)
    left = 0.9 * 2**30 - model.resident_bytes - 0.25 * 2**30
    assert max_requests(model, device, 1280, 0.9) == left // (1280 * 512)
    row = hardware_table(model, device, 1152, 1280, 0.9)["w4a16"]
    assert row.rate_tflops == 4
    left += model.own_bytes["w8a8"]
    assert row.requests_alone == left // (1280 * 512)
    assert kv_cache_tokens(model, device, 1, 0.9, ["w4a16"]) == left // 512


def test_model_that_does_not_fit_is_refused(merged: Path, device: Device) -> None:
    model = dataclasses.replace(read_model_shape(merged), shared_bytes=0.6 * 2**30)
    assert max_requests(model, device, 10, 0.9) > 1
    with pytest.raises(FlexQuantError, match=r"does not fit on .*: 0\.6 GiB of weights .* 0\.8 of its 1 GiB"):
        max_requests(model, device, 10, 0.8)
    with pytest.raises(FlexQuantError, match="--tensor-parallel-size, shorter requests, a larger device"):
        max_requests(model, device, 1_000_000, 0.9)
    with pytest.raises(FlexQuantError, match=r"GiB of weights \(w4a16\), "):
        kv_cache_tokens(model, device, 10, 0.8, ["w4a16"])


def tuned(path: Path, times: dict[str, Any] | None) -> str:
    policy = {"schema": "flexquant.policy/v1", "rules": [{"use": "w8a8"}]}
    path.write_text(json.dumps(policy if times is None else {**policy, "measured": times}))
    return str(path)


def test_command(
    capsys: pytest.CaptureFixture[str], merged: Path, tmp_path: Path, only_predict: None
) -> None:
    text, result = run_predict(capsys, str(merged), "--device", "h100", "--w4a8")
    assert "NVIDIA H100 SXM, 80 GB (h100)" in text
    assert "fastest decode by sequences: " in text and "predicted against" not in text
    assert "\nmemory 79.6 GiB" in text and result["tensor_parallel_size"] == 1
    assert set(result["hardware"]) == {"w8a8", "w4a16", "w4a8"}
    assert result["max_requests"] > 1000
    assert result["errors"] is None
    slower = result["times"]
    for curves in (slower["decode_ms"], slower["prefill_ms"]):
        for curve in curves.values():
            for size, times in curve.items():
                curve[size] = [2 * time for time in times]
    policy = tuned(tmp_path / "tuned.yaml", slower)
    text, result = run_predict(capsys, str(merged), "--device", "h100", "--measured", policy)
    assert f"predicted against {policy} (predicted for h100): median over the measured sizes" in text
    assert "prefill: w8a8 -50 % (-50 %), w4a16 -50 % (-50 %)" in text
    assert result["errors"]["decode"]["w4a16"]["8"] == pytest.approx(-0.5, abs=1e-3)
    text, _ = run_predict(capsys, str(merged), "--device", "h100", "--tensor-parallel-size", "2")
    assert "\nper device: memory 79.6 GiB" in text


def test_a_published_checkpoint_is_predicted_with_the_int8_that_it_computes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, only_predict: None
) -> None:
    """Where the device has no INT8 kernel, this is said."""
    folder = str(make_checkpoint(tmp_path / "int4", scheme="w4a16"))
    text, result = run_predict(capsys, folder, "--device", "l20")
    assert list(result["hardware"]) == ["w4a16", "w8a8-from-int4"] and "note:" not in text
    text, result = run_predict(capsys, folder, "--device", "b200")
    assert list(result["hardware"]) == ["w4a16"]
    assert text.endswith("'w8a8-from-int4' is left out, as the device has no INT8 kernel")


def test_command_compares_with_the_stored_measurement(
    capsys: pytest.CaptureFixture[str], merged: Path, tmp_path: Path, only_predict: None
) -> None:
    for file in merged.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    measured = predict_pass_times(merged, "h100").to_data()
    machine = {"cpu": "AMD EPYC", "cores": 2, "gpu": None}
    measured["origin"] = {"machine": machine, "engine_arguments": {"tensor_parallel_size": 1}}
    config = json.loads((merged / "config.json").read_text())
    policy = json.loads(Path(tuned(tmp_path / "tuned.yaml", measured)).read_text())
    config["quantization_config"]["policy"] = policy
    (tmp_path / "config.json").write_text(json.dumps(config))
    text, result = run_predict(capsys, str(tmp_path), "--device", "h100")
    assert result["measured"] == (
        "the checkpoint's policy (measured on AMD EPYC, 2 cores, tensor-parallel size 1)"
    )
    assert f"predicted against {result['measured']}: median" in text
    assert result["errors"]["decode"]["w8a8"]["8"] == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (
            {"machine": {"cpu": "x", "cores": 8, "gpu": "NVIDIA H20"}, "engine_arguments": {}},
            "measured on NVIDIA H20, tensor-parallel size 1",
        ),
        ({"machine": "mine"}, "measured on mine, tensor-parallel size unknown"),
        ({}, "measured on an unknown machine, tensor-parallel size unknown"),
    ],
)
def test_where_a_measurement_was_made(origin: dict[str, Any], expected: str) -> None:
    assert describe_origin(origin) == expected


def test_errors_need_a_variant_in_common(merged: Path, merged_fp8: Path, tmp_path: Path) -> None:
    times = predict_pass_times(merged_fp8, "h100")
    only_fp8 = dataclasses.replace(
        times, decode={"fp8": times.decode["fp8"]}, prefill={"fp8": times.prefill["fp8"]}
    )
    with pytest.raises(FlexQuantError, match="the measurement is of fp8, but the model has w8a8, w4a16"):
        errors(read_model_shape(merged), load_device("h100"), only_fp8)
    assert load_policy(tuned(tmp_path / "p.yaml", times.to_data())).measured is not None


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--device", "h100"], 2, "give a merged checkpoint and --device"),
        (["OUT"], 2, "give a merged checkpoint and --device"),
        (["OUT", "--device", "tpu"], 1, "unknown device 'tpu'"),
        (["missing", "--device", "h100"], 1, "no such folder: missing"),
        (["OUT", "--device", "h100", "--measured", "phase-batch"], 1, "phase-batch has no measured times"),
        (["OUT", "--device", "l4", "--input-len", "900000000"], 1, "does not fit on l4"),
        (["OUT", "--device", "l4", "--tensor-parallel-size", "3"], 1, "3 devices cannot share"),
    ],
)
def test_command_refuses(
    capsys: pytest.CaptureFixture[str],
    merged: Path,
    only_predict: None,
    argv: list[str],
    code: int,
    message: str,
) -> None:
    assert cli.main(["predict", *(str(merged) if word == "OUT" else word for word in argv)]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("flexquant predict: error: ") and message in line


@pytest.mark.parametrize("share", ["0", "1.5", "most"])
def test_utilization_is_a_share(only_predict: None, capsys: pytest.CaptureFixture[str], share: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["predict", "x", "--device", "h100", "--gpu-memory-utilization", share])
    assert f"'{share}' is not a share above 0" in capsys.readouterr().err


def test_command_lists_devices(capsys: pytest.CaptureFixture[str], only_predict: None) -> None:
    text, result = run_predict(capsys, "--list-devices")
    assert [line.split()[0] for line in text.splitlines()] == builtin_devices()
    assert result["devices"]["a100"] == "NVIDIA A100 SXM, 80 GB"


def test_the_main_scheme_is_that_of_most_weights_of_all_experts(merged: Path, device: Device) -> None:
    experts = Linear(128, 128, 8192, "w4a16", experts=8, active_experts=2)
    linears = {"w4a16": {plain_linear(256, 256): 1, experts: 1}}
    model = dataclasses.replace(read_model_shape(merged), linears=linears)
    assert main_scheme(model, "w4a16", device) == "w4a16"


def test_errors_are_those_of_the_medians(merged: Path, device: Device) -> None:
    model, times = read_model_shape(merged), predict_pass_times(merged, device, context=100)
    spread = {
        variant: {size: Time(2 * t.median, t.median, 9 * t.median) for size, t in curve.items()}
        for variant, curve in times.decode.items()
    }
    found = errors(model, device, dataclasses.replace(times, decode=spread))
    assert found["decode"]["w8a8"][8] == pytest.approx(-0.5)


def test_a_report_is_of_requests_that_are_half_answered(merged: Path, device: Device) -> None:
    assert report_prediction(read_model_shape(merged), device, 1000, 200, 0.9).times.context == 1100
