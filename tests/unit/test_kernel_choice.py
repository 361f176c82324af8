# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How a CPU kernel is chosen: the sizes that are tried, what is remembered, what a failed trial does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import yaml

from flexquant.policy.routes import build_route_table
from flexquant.policy.rules import load_policy, parse_policy
from flexquant.serving.kernels import trial
from flexquant.serving.kernels.choice import sizes_by_variant, zentorch_problem
from flexquant.serving.kernels.cpu_kernels import TorchCPUInt4LinearKernel
from flexquant.serving.kernels.trial import find_fastest
from flexquant.serving.vllm_api import _custom_ops  # noqa: F401 - loads torch.ops._C

TORCH = f"{TorchCPUInt4LinearKernel.__module__}:{TorchCPUInt4LinearKernel.__name__}"
STOCK = "flexquant.serving.kernels.cpu_kernels:CPUW4A16LinearKernel"
LAYER = {
    "inputs": 256,
    "outputs": 128,
    "dtype": "bfloat16",
    "group_size": 64,
    "zero_points": False,
    "sizes": [1, 64],
}
DECODES_FEW = """
schema: flexquant.policy/v1
rules:
  - when: {phase: decode, batch_size: {min: 3, max: 3}}
    use: w4a16
  - use: w8a8
"""


def sizes(policy: str) -> dict[str, tuple[int, ...]]:
    read = parse_policy(yaml.safe_load(policy), "test") if "\n" in policy else load_policy(policy)
    return sizes_by_variant(
        build_route_table(read, ["w8a8", "w4a16"], num_layers=2, max_tokens=2048, max_decode_tokens=128)
    )


@pytest.mark.parametrize(
    "policy, expected",
    [
        ("w4a16", {"w4a16": (1, 2, 4, 8, 16, 32, 64)}),
        ("phase", {"w8a8": (64, 256), "w4a16": (1, 2, 4, 8, 16, 32, 64)}),
        ("phase-batch", {"w8a8": (64,), "w4a16": (1, 2, 4, 8, 16, 32)}),
        (DECODES_FEW, {"w8a8": (1, 2, 4, 8, 16, 32, 64), "w4a16": (3,)}),
    ],
)
def test_kernels_are_tried_with_the_sizes_that_the_policy_gives(policy, expected):
    assert sizes(policy) == expected


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    return tmp_path / "flexquant" / "kernels"


@pytest.mark.skipif(
    not hasattr(torch.ops._C, "cpu_gemm_wna16"), reason="on this CPU there is one INT4 kernel"
)
@pytest.mark.parametrize("zero_points", [False, True])
def test_a_trial_times_real_kernels_and_is_made_once(cache, monkeypatch, zero_points):
    layer = {**LAYER, "zero_points": zero_points, "kernels": [STOCK, TORCH]}
    (chosen,) = find_fastest([layer])
    (file,) = cache.iterdir()
    found = json.loads(file.read_text())
    assert found["chosen"] == chosen
    assert {name: sorted(times) for name, times in found["microseconds"].items()} == {
        STOCK: ["1", "64"],
        TORCH: ["1", "64"],
    }
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert find_fastest([layer, layer]) == [chosen, chosen]


def remember(cache: Path, layer: dict, **changes: object) -> Path:
    """Put a trial into the cache, as this machine would."""
    key = {**trial._circumstances(), **layer}
    file = cache / f"{trial.digest_of(key)[:32]}.json"
    cache.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"key": key, "chosen": TORCH, "microseconds": {}} | changes))
    return file


def test_a_trial_that_fails_leaves_vllms_first_kernel_and_nothing_behind(cache, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert find_fastest([{**LAYER, "kernels": [STOCK, TORCH]}]) == [STOCK]
    assert not cache.exists()


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", json.dumps({"key": {}, "chosen": TORCH}), None],
    ids=["empty", "list", "nothing", "another key", "another kernel"],
)
def test_what_is_no_trial_of_this_layer_is_not_believed(cache, monkeypatch, content):
    layer = {**LAYER, "kernels": [STOCK, TORCH]}
    file = remember(cache, layer, chosen="os:system")
    if content is not None:
        file.write_text(content)
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert find_fastest([layer]) == [STOCK]
    remember(cache, layer)
    assert find_fastest([layer]) == [TORCH]


def test_the_first_kernel_is_kept_unless_another_is_clearly_faster():
    def times(*microseconds: float) -> dict[str, dict[str, float]]:
        return {name: {"1": t, "64": t} for name, t in zip((STOCK, TORCH), microseconds, strict=True)}

    assert trial._least(times(100, 96), STOCK) == STOCK
    assert trial._least(times(100, 90), STOCK) == TORCH


@pytest.mark.parametrize(
    "code, reason",
    [
        ("raise OSError('undefined symbol: _ZN3c10')", "undefined symbol: _ZN3c10"),
        ("import a_module_that_nobody_has", "No module named 'a_module_that_nobody_has'"),
        ("", "it is for AMD CPUs with AVX512"),
    ],
    ids=["for another torch", "incomplete", "on another CPU"],
)
def test_a_zentorch_that_vllm_does_not_take_is_told_in_one_line(tmp_path, monkeypatch, code, reason):
    assert zentorch_problem() is None
    metadata = tmp_path / "zentorch-9.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: zentorch\nVersion: 9.9\n")
    (tmp_path / "zentorch.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "zentorch", raising=False)
    problem = zentorch_problem()
    assert problem is not None and problem.startswith("zentorch 9.9 is installed and not used: ")
    assert reason in problem and "extra 'zen'" in problem and "\n" not in problem
